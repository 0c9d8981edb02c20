// How quickly a controller answers under load, and what memory the load takes.
//
//   load_bench [--controller=FILE] [--jobs=1000] [--watchers=100] [--seconds=10] [--durable]
//
// Starts the given shardprep-controller, queues as many jobs on one tiny checkpoint, each with a
// destination of its own, opens as many watches, and lets three clients call in a closed loop for
// the given time: Get of random jobs, List of a full page, and Synchronize of a worker that holds a
// lease and reports progress. Prints percentiles of each call and the controller's memory before
// the jobs, with them, and after the calls. Target: p99 below 5 ms on two processors. Exits with 1
// when a call fails.
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "shardprep/v1/prep.grpc.pb.h"
#include "shardprep/v1/worker.grpc.pb.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/job_plan.h"
#include "workers/policy_file.h"
#include "workers/version.h"

ABSL_FLAG(std::string, controller, "build/release/bin/shardprep-controller", "The binary.");
ABSL_FLAG(int, jobs, 1000, "Jobs to queue.");
ABSL_FLAG(int, watchers, 100, "Watches to keep open.");
ABSL_FLAG(int, seconds, 10, "How long to call.");
ABSL_FLAG(bool, durable, true, "Keep the jobs in a state directory.");

namespace shardprep {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);
constexpr int kListPage = 100;

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "load_bench: %s\n", what.c_str());
  std::exit(1);
}

std::unique_ptr<grpc::ClientContext> Context() {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(absl::ToChronoTime(absl::Now() + kDeadline));
  return context;
}

void Require(const grpc::Status& status, const char* call) {
  if (!status.ok()) Die(absl::StrCat(call, ": ", status.error_message()));
}

// The controller's process; killed with the object.
class ControllerProcess {
 public:
  ControllerProcess(const std::string& program, std::vector<std::string> arguments,
                    const std::string& log_path)
      : log_path_(log_path) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 1, log_path.c_str(), O_CREAT | O_WRONLY | O_APPEND,
                                     0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    arguments.insert(arguments.begin(), program);
    std::vector<char*> argv;
    argv.reserve(arguments.size() + 1);
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const int error =
        ::posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    if (error != 0) Die(absl::StrCat("cannot start ", program));
  }
  ~ControllerProcess() {
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  // The address that it says it listens on.
  std::string Address() const {
    constexpr absl::Duration kPause = absl::Milliseconds(20);
    for (absl::Duration waited; waited < kDeadline; waited += kPause) {
      std::ifstream log(log_path_);
      for (std::string line; std::getline(log, line);) {
        const size_t at = line.find("127.0.0.1:");
        if (line.find("listening") == std::string::npos || at == std::string::npos) continue;
        return line.substr(at, line.find_first_not_of("0123456789.:", at) - at);
      }
      if (::waitpid(pid_, nullptr, WNOHANG) != 0) break;
      absl::SleepFor(kPause);
    }
    Die(absl::StrCat("the controller does not listen; see ", log_path_));
  }

  // VmRSS in KiB.
  int64_t MemoryKib() const {
    std::ifstream status(absl::StrCat("/proc/", pid_, "/status"));
    for (std::string line; std::getline(status, line);) {
      int64_t kib = 0;
      if (std::sscanf(line.c_str(), "VmRSS: %ld kB", &kib) == 1) return kib;
    }
    return 0;
  }

 private:
  const std::string log_path_;
  pid_t pid_ = 0;
};

// Latencies of one kind of call.
class Latencies {
 public:
  void Add(absl::Duration latency) { all_.push_back(absl::ToDoubleMilliseconds(latency)); }

  void Print(const char* call) {
    if (all_.empty()) Die(absl::StrCat("not one ", call));
    std::sort(all_.begin(), all_.end());
    const auto at = [this](double part) {
      return all_[static_cast<size_t>(part * static_cast<double>(all_.size() - 1))];
    };
    std::printf("%-12s %8zu calls   p50 %7.3f ms   p99 %7.3f ms   max %7.3f ms\n", call,
                all_.size(), at(0.5), at(0.99), all_.back());
  }

 private:
  std::vector<double> all_;
};

template <typename Call>
void Timed(Latencies& latencies, const char* name, Call call) {
  const absl::Time start = absl::Now();
  const grpc::Status status = call();
  latencies.Add(absl::Now() - start);
  Require(status, name);
}

class Load {
 public:
  Load(const std::string& address, const TempDir& directory)
      : directory_(directory),
        channel_(grpc::CreateChannel(address, grpc::InsecureChannelCredentials())),
        prep_(v1::PrepService::NewStub(channel_)) {}

  void CreateJobs(int count) {
    for (int i = 0; i < count; ++i) {
      v1::CreatePrepJobRequest request;
      request.set_prep_job_id(JobId(i));
      request.mutable_spec()->set_source_uri(directory_ / "source");
      v1::Target& target = *request.mutable_spec()->add_targets();
      target.mutable_parallel_layout()->set_tensor_parallel_size(2);
      target.set_destination_uri(directory_ / absl::StrCat("out/", i));
      v1::PrepJob job;
      Timed(created_, "CreatePrepJob",
            [&] { return prep_->CreatePrepJob(Context().get(), request, &job); });
    }
    jobs_ = count;
  }

  void Watch(int count) {
    for (int i = 0; i < count; ++i) {
      // Of the oldest jobs, which run and change.
      auto context = std::make_unique<grpc::ClientContext>();
      watchers_.emplace_back([this, id = JobId(i % jobs_), context = context.get()] {
        v1::WatchPrepJobRequest request;
        request.set_prep_job_id(id);
        const auto reader = prep_->WatchPrepJob(context, request);
        v1::PrepJob job;
        bool is_first = true;
        while (reader->Read(&job)) {
          ++watched_;
          if (is_first) ++watching_;
          is_first = false;
        }
        reader->Finish();
      });
      watch_contexts_.push_back(std::move(context));
    }
    while (watching_ < count) absl::SleepFor(absl::Milliseconds(10));
  }

  void Call(absl::Duration time) {
    const absl::Time end = absl::Now() + time;
    std::thread getter([&] { GetUntil(end); });
    std::thread lister([&] { ListUntil(end); });
    std::thread worker([&] { SynchronizeUntil(end); });
    getter.join();
    lister.join();
    worker.join();
  }

  void StopWatching() {
    for (const auto& context : watch_contexts_) context->TryCancel();
    for (std::thread& watcher : watchers_) watcher.join();
  }

  void Print() {
    created_.Print("Create");
    got_.Print("Get");
    listed_.Print("List");
    synchronized_.Print("Synchronize");
    std::printf("watches      %8lld messages\n", static_cast<long long>(watched_));
  }

 private:
  static std::string JobId(int number) { return absl::StrCat("job-", number); }

  void GetUntil(absl::Time end) {
    std::mt19937 random(1);
    while (absl::Now() < end) {
      v1::GetPrepJobRequest request;
      request.set_prep_job_id(JobId(static_cast<int>(random() % static_cast<unsigned>(jobs_))));
      v1::PrepJob job;
      Timed(got_, "GetPrepJob", [&] { return prep_->GetPrepJob(Context().get(), request, &job); });
    }
  }

  void ListUntil(absl::Time end) {
    v1::ListPrepJobsRequest request;
    request.set_page_size(kListPage);
    while (absl::Now() < end) {
      v1::ListPrepJobsResponse response;
      Timed(listed_, "ListPrepJobs",
            [&] { return prep_->ListPrepJobs(Context().get(), request, &response); });
      request.set_page_token(response.next_page_token());
    }
  }

  // Its first call may wait for a lease; each later one reports that lease and is answered at once.
  void SynchronizeUntil(absl::Time end) {
    const auto stub = v1::WorkerService::NewStub(channel_);
    v1::SynchronizeRequest request;
    request.set_worker_id("load-bench");
    request.mutable_build()->set_format_version(kFormatVersion);
    request.mutable_build()->set_policy_digest(DefaultAlignmentPolicy().sha256_hex);
    request.mutable_build()->set_tool_version(kToolVersion);
    request.set_memory_budget_bytes(int64_t{512} << 20);
    request.set_thread_count(1);
    request.set_device("cpu");
    v1::SynchronizeResponse response;
    while (response.leases_size() == 0) {
      Require(stub->Synchronize(Context().get(), request, &response), "Synchronize");
    }
    v1::LeaseReport& report = *request.add_leases();
    report.set_lease_id(response.leases(0).lease_id());
    report.set_state(v1::LeaseReport::STATE_RUNNING);
    while (absl::Now() < end) {
      report.set_bytes_read(report.bytes_read() + 1);
      Timed(synchronized_, "Synchronize",
            [&] { return stub->Synchronize(Context().get(), request, &response); });
    }
  }

  const TempDir& directory_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::PrepService::Stub> prep_;
  int jobs_ = 0;
  std::vector<std::unique_ptr<grpc::ClientContext>> watch_contexts_;
  std::vector<std::thread> watchers_;
  std::atomic<int> watching_{0};
  std::atomic<int64_t> watched_{0};
  // Each filled by one thread.
  Latencies created_, got_, listed_, synchronized_;
};

void Run() {
  const TempDir directory;
  CheckpointSpec spec;
  spec.hidden = spec.intermediate = 64;
  spec.experts = 2;
  spec.layers = 1;
  spec.files = 1;
  const absl::Status written = WriteTestCheckpoint(directory / "source", spec);
  if (!written.ok()) Die(written.ToString());
  const int jobs = absl::GetFlag(FLAGS_jobs);
  std::vector<std::string> arguments = {"--listen=127.0.0.1:0", "--log_level=info",
                                        absl::StrCat("--max_queued_jobs=", jobs)};
  if (absl::GetFlag(FLAGS_durable)) {
    arguments.push_back(absl::StrCat("--state_dir=", directory / "state"));
  }
  const ControllerProcess controller(absl::GetFlag(FLAGS_controller), arguments, directory / "log");
  Load load(controller.Address(), directory);
  const int64_t before = controller.MemoryKib();
  load.CreateJobs(jobs);
  load.Watch(absl::GetFlag(FLAGS_watchers));
  const int64_t loaded = controller.MemoryKib();
  load.Call(absl::Seconds(absl::GetFlag(FLAGS_seconds)));
  const int64_t after = controller.MemoryKib();
  load.StopWatching();
  std::printf("%d jobs, %d watches, %u processors\n", jobs, absl::GetFlag(FLAGS_watchers),
              std::thread::hardware_concurrency());
  load.Print();
  std::printf("VmRSS        %8.1f MiB empty   %.1f MiB with jobs and watches   %.1f MiB after\n",
              static_cast<double>(before) / 1024, static_cast<double>(loaded) / 1024,
              static_cast<double>(after) / 1024);
}

}  // namespace
}  // namespace shardprep

int main(int argc, char** argv) {
  absl::ParseCommandLine(argc, argv);
  shardprep::Run();
  return 0;
}
