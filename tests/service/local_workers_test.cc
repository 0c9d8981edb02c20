#include "service/local_workers.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace shardprep {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

// What the supervisor tells of ended processes.
class Endings {
 public:
  std::function<void(const std::string&, const std::string&)> Callback() {
    return [this](const std::string& id, const std::string& how) {
      absl::MutexLock lock(&mu_);
      ended_.emplace_back(id, how);
    };
  }
  std::vector<std::pair<std::string, std::string>> Await(size_t count) {
    absl::MutexLock lock(&mu_);
    const auto enough = [this, count]()
                            ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return ended_.size() >= count; };
    EXPECT_TRUE(mu_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(20)));
    return ended_;
  }

 private:
  absl::Mutex mu_;
  std::vector<std::pair<std::string, std::string>> ended_ ABSL_GUARDED_BY(mu_);
};

LocalWorkersOptions Shell(const std::string& script, int count = 1) {
  LocalWorkersOptions options;
  options.count = count;
  options.program = "/bin/sh";
  options.arguments = {"-c", script, "{id}"};
  options.id_prefix = "t";
  options.restart_pause = absl::Milliseconds(1);
  options.max_restart_pause = absl::Milliseconds(10);
  return options;
}

// `read` blocks on the pipe that the supervisor holds, so the shell lives as long as it is let.
constexpr char kIdle[] = "read line";

TEST(LocalWorkers, DoNotInheritTheFlagsOfTheirController) {
  ASSERT_EQ(::setenv("SHARDPREP_FLAG_LISTEN", "127.0.0.1:1", 1), 0);
  ASSERT_EQ(::setenv("SHARDPREP_OTHER", "kept", 1), 0);
  Endings endings;
  {
    const auto workers = LocalWorkers::Start(
        Shell("test -z \"$SHARDPREP_FLAG_LISTEN\" && test \"$SHARDPREP_OTHER\" = kept && exit 7"),
        endings.Callback());
    ASSERT_TRUE(workers.ok()) << workers.status();
    EXPECT_EQ(endings.Await(1).front().second, "exited with code 7");
  }
  ::unsetenv("SHARDPREP_FLAG_LISTEN");
  ::unsetenv("SHARDPREP_OTHER");
}

TEST(LocalWorkers, EndedProcessIsToldAndReplacedUnderAnotherId) {
  Endings endings;
  const auto workers = LocalWorkers::Start(Shell("exit 3"), endings.Callback());
  ASSERT_TRUE(workers.ok()) << workers.status();
  const auto ended = endings.Await(3);
  EXPECT_EQ(ended[0], std::make_pair(std::string("t-0-0"), std::string("exited with code 3")));
  EXPECT_EQ(ended[1].first, "t-0-1");
  EXPECT_EQ(ended[2].first, "t-0-2");
}

TEST(LocalWorkers, SignalIsNamed) {
  Endings endings;
  const auto workers = LocalWorkers::Start(Shell("kill -SEGV $$"), endings.Callback());
  ASSERT_TRUE(workers.ok());
  EXPECT_THAT(endings.Await(1)[0].second, HasSubstr("killed by signal 11"));
}

TEST(LocalWorkers, IdIsPassedToTheProcess) {
  Endings endings;
  // $0 is the argument after the script.
  const auto workers =
      LocalWorkers::Start(Shell("test \"$0\" = t-0-0 && exit 42"), endings.Callback());
  ASSERT_TRUE(workers.ok());
  EXPECT_EQ(endings.Await(1)[0].second, "exited with code 42");
}

TEST(LocalWorkers, EachSlotGetsItsOwnArguments) {
  Endings endings;
  LocalWorkersOptions options = Shell("exit $1", 2);
  options.slot_arguments = {{"40"}, {"41"}};
  const auto workers = LocalWorkers::Start(options, endings.Callback());
  ASSERT_TRUE(workers.ok());
  const auto ended = endings.Await(8);
  EXPECT_THAT(ended, Contains(Pair("t-0-0", "exited with code 40")));
  EXPECT_THAT(ended, Contains(Pair("t-1-0", "exited with code 41")));
}

TEST(LocalWorkers, StopEndsAllWithinTheGraceTime) {
  Endings endings;
  const auto workers = LocalWorkers::Start(Shell(kIdle, 3), endings.Callback());
  ASSERT_TRUE(workers.ok());
  (*workers)->Stop(absl::Seconds(20));
  EXPECT_THAT((*workers)->Running(), IsEmpty());
  for (const auto& [id, how] : endings.Await(0)) {
    EXPECT_THAT(how, HasSubstr("killed by signal 15")) << id;
  }
}

TEST(LocalWorkers, WorkerThatIgnoresTerminationIsKilled) {
  Endings endings;
  const auto workers = LocalWorkers::Start(
      Shell("trap '' TERM; kill -USR1 $PPID; read line; read line"), endings.Callback());
  ASSERT_TRUE(workers.ok());
  // The shell has set its trap when it sends this.
  int signal = 0;
  sigset_t ready;
  sigemptyset(&ready);
  sigaddset(&ready, SIGUSR1);
  sigwait(&ready, &signal);
  (*workers)->Stop(absl::Milliseconds(50));
  EXPECT_THAT(endings.Await(1)[0].second, HasSubstr("killed by signal 9"));
}

TEST(LocalWorkers, KillEndsOneProcessByItsId) {
  Endings endings;
  const auto workers =
      LocalWorkers::Start(Shell(absl::StrCat("kill -USR1 $PPID; ", kIdle), 1), endings.Callback());
  ASSERT_TRUE(workers.ok());
  int signal = 0;
  sigset_t ready;
  sigemptyset(&ready);
  sigaddset(&ready, SIGUSR1);
  sigwait(&ready, &signal);
  (*workers)->Kill("nobody");
  (*workers)->Kill("t-0-0");
  const auto ended = endings.Await(1);
  EXPECT_EQ(ended[0].first, "t-0-0");
  EXPECT_THAT(ended[0].second, HasSubstr("killed by signal 9"));
}

TEST(LocalWorkers, MissingProgramIsToldAtOnce) {
  LocalWorkersOptions options = Shell("");
  options.program = "/nowhere/shardprep-worker";
  EXPECT_EQ(LocalWorkers::Start(options, nullptr).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(BinaryBesideOwn("no-such-binary").status().code(),
            absl::StatusCode::kFailedPrecondition);
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  // Blocked in every thread, so that the tests' sigwait() takes it.
  sigset_t ready;
  sigemptyset(&ready);
  sigaddset(&ready, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &ready, nullptr);
  testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
