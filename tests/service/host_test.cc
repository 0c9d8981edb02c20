// The real backend, and a whole private controller with its worker process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "service/client.h"
#include "service/controller_host.h"
#include "service/prep_backend.h"
#include "service/private_controller.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

v1::PrepJobSpec Spec(const std::string& source, const std::string& destination) {
  v1::PrepJobSpec spec;
  spec.set_source_uri(source);
  v1::Target& target = *spec.add_targets();
  target.set_destination_uri(destination);
  target.mutable_parallel_layout()->set_tensor_parallel_size(2);
  return spec;
}

// With a second target, of four ranks.
v1::PrepJobSpec SpecOfTwo(const std::string& source, const std::string& first,
                          const std::string& second) {
  v1::PrepJobSpec spec = Spec(source, first);
  v1::Target& target = *spec.add_targets();
  target.set_destination_uri(second);
  target.mutable_parallel_layout()->set_tensor_parallel_size(4);
  return spec;
}

absl::StatusOr<std::unique_ptr<PlannedJob>> PlanWith(const PrepBackendOptions& options,
                                                     const v1::PrepJobSpec& spec) {
  const absl::StatusOr<std::unique_ptr<JobBackend>> backend = MakePrepBackend(options);
  if (!backend.ok()) return backend.status();
  const absl::StatusOr<v1::PrepJobSpec> normal = (*backend)->Normalize(spec);
  if (!normal.ok()) return normal.status();
  return (*backend)->Plan(*normal, int64_t{512} << 20);
}

TEST(PrepBackend, PlacesOutsideTheAllowListsAreRefused) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "models/m1", {}), absl::OkStatus());
  ASSERT_EQ(WriteTestCheckpoint(dir / "secret", {}), absl::OkStatus());
  // A link inside the allowed folder that leads out of it, and a folder with the same beginning.
  std::filesystem::create_directory_symlink(dir / "secret", dir / "models/link");
  std::filesystem::create_directories(dir / "models-2");
  const PrepBackendOptions options = {.allow_source = {dir / "models"},
                                      .allow_destination = {dir / "out"}};
  EXPECT_TRUE(PlanWith(options, Spec(dir / "models/m1", dir / "out/a")).ok());
  const std::vector<v1::PrepJobSpec> refused = {
      Spec(dir / "secret", dir / "out/a"), Spec(dir / "models/link", dir / "out/a"),
      Spec(dir / "models-2", dir / "out/a"), Spec(dir / "models/m1", dir / "other"),
      Spec(dir / "models/m1", dir / "models/m1/out")};
  for (const v1::PrepJobSpec& spec : refused) {
    const absl::Status status = PlanWith(options, spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << spec.ShortDebugString();
    EXPECT_EQ(ReasonOf(status).reason, "URI_NOT_ALLOWED");
  }
}

TEST(PrepBackend, SourceIsNoDestinationNotEvenThroughALink) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", {}), absl::OkStatus());
  std::filesystem::create_directory_symlink(dir / "model", dir / "link");
  EXPECT_EQ(PlanWith({}, Spec(dir / "model", dir / "link")).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(PlanWith({}, Spec(dir / "model", dir / "model/prepared")).ok());
}

TEST(PrepBackend, PlanningWritesNothing) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", {}), absl::OkStatus());
  const auto planned = PlanWith({}, Spec(dir / "model", dir / "out"));
  ASSERT_TRUE(planned.ok()) << planned.status();
  const auto found = (*planned)->Inspect();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->complete.empty());
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
  const PlanFacts& facts = (*planned)->facts();
  ASSERT_EQ(facts.places.size(), 1U);
  EXPECT_EQ(facts.places[0].destination, dir / "out");
  EXPECT_EQ(facts.places[0].fingerprint, facts.fingerprint);
  EXPECT_EQ(facts.summary.layout_fingerprint(), facts.fingerprint);
  EXPECT_GT(facts.summary.destination_free_bytes(), 0);
  int64_t bytes = 0;
  for (const RegionTasks& region : facts.regions) {
    bytes += region.BytesOf(region.ranks);
  }
  // Output bytes count headers as well.
  EXPECT_LE(bytes, facts.summary.output_bytes());
  EXPECT_GT(bytes, facts.summary.output_bytes() * 9 / 10);
}

TEST(PrepBackend, TooLittleSpaceIsRefusedNamingFreeAndNeeded) {
  const TempDir dir;
  CheckpointSpec large;
  large.hidden = large.intermediate = 65536;
  large.experts = 64;
  large.layers = 8;
  large.files = 8;
  large.sparse = true;
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", large), absl::OkStatus());
  const auto planned = PlanWith({}, Spec(dir / "model", dir / "out"));
  ASSERT_TRUE(planned.ok()) << planned.status();
  const int64_t needed = (*planned)->facts().summary.output_bytes();
  if ((*planned)->facts().summary.destination_free_bytes() > needed) {
    // The sparse source announces terabytes; where more than that is free nothing is to be refused.
    GTEST_SKIP() << "this file system has room for " << needed << " bytes";
  }
  const absl::Status refused = (*planned)->CheckRoom(*(*planned)->Inspect());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused).reason, "NO_SPACE");
  EXPECT_EQ(ReasonOf(refused).metadata["needed_bytes"], std::to_string(needed));
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

TEST(PrepBackend, JobOfSeveralTargetsHasTheRanksAndPlacesOfAll) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", {}), absl::OkStatus());
  const auto planned = PlanWith({}, SpecOfTwo(dir / "model", dir / "x", dir / "y"));
  ASSERT_TRUE(planned.ok()) << planned.status();
  const auto alone = PlanWith({}, Spec(dir / "model", dir / "x"));
  ASSERT_TRUE(alone.ok()) << alone.status();
  const PlanFacts& facts = (*planned)->facts();
  ASSERT_EQ(facts.places.size(), 2U);
  EXPECT_EQ(facts.places[0].destination, dir / "x");
  EXPECT_EQ(facts.places[0].fingerprint, (*alone)->facts().fingerprint);
  EXPECT_EQ(facts.places[1].destination, dir / "y");
  EXPECT_EQ(facts.places[1].fingerprint, facts.summary.other_targets(0).layout_fingerprint());
  EXPECT_EQ(std::set<std::string>(
                {facts.places[0].fingerprint, facts.places[1].fingerprint, facts.fingerprint})
                .size(),
            3U);
  EXPECT_GT(facts.summary.other_targets(0).destination_free_bytes(), 0);
  int64_t bytes = 0;
  std::set<int32_t> ranks;
  for (const RegionTasks& region : facts.regions) {
    bytes += region.BytesOf(region.ranks);
    ranks.insert(region.ranks.begin(), region.ranks.end());
  }
  EXPECT_THAT(ranks, ElementsAre(-2, -1, 0, 1, 2, 3, 4, 5));
  EXPECT_LE(bytes, facts.summary.joint().output_bytes());
  EXPECT_GT(bytes, facts.summary.joint().output_bytes() * 9 / 10);
}

TEST(PrepBackend, TargetsShareNoPlaceNotEvenThroughALink) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", {}), absl::OkStatus());
  std::filesystem::create_directories(dir / "x");
  std::filesystem::create_directory_symlink(dir / "x", dir / "link");
  const absl::Status refused =
      PlanWith({}, SpecOfTwo(dir / "model", dir / "x", dir / "link")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("are one place"));
}

TEST(PrepBackend, DestinationsAreClaimedTogetherOrNotAtAll) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", {}), absl::OkStatus());
  const auto holder = PlanWith({}, Spec(dir / "model", dir / "y"));
  const auto both = PlanWith({}, SpecOfTwo(dir / "model", dir / "x", dir / "y"));
  const auto other = PlanWith({}, Spec(dir / "model", dir / "x"));
  ASSERT_TRUE(holder.ok() && both.ok() && other.ok());
  ASSERT_EQ((*holder)->ClaimDestination(), absl::OkStatus());
  const absl::Status refused = (*both)->ClaimDestination();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused).reason, "DESTINATION_BUSY");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("targets[1]: "));
  EXPECT_EQ((*other)->ClaimDestination(), absl::OkStatus()) << "the first was given back";
  (*other)->ReleaseDestination();
  (*holder)->ReleaseDestination();
  EXPECT_EQ((*both)->ClaimDestination(), absl::OkStatus());
  EXPECT_EQ((*both)->ClaimDestination(), absl::OkStatus()) << "held already";
  EXPECT_FALSE((*other)->ClaimDestination().ok());
  EXPECT_FALSE((*holder)->ClaimDestination().ok());
}

TEST(PrepBackend, TargetsOnOneFileSystemNeedTheirRoomTogether) {
  const TempDir dir;
  ASSERT_EQ(WriteTestCheckpoint(dir / "small", {}), absl::OkStatus());
  const auto small = PlanWith({}, Spec(dir / "small", dir / "x"));
  ASSERT_TRUE(small.ok()) << small.status();
  const int64_t free = (*small)->facts().summary.destination_free_bytes();
  // Each target takes about two thirds of what is free.
  CheckpointSpec large;
  large.hidden = large.intermediate = 32768;
  large.layers = 1;
  large.sparse = true;
  const int64_t expert_bytes = 3 * large.hidden * large.intermediate * 17 / 32;
  large.experts = free / 3 * 2 / expert_bytes;
  if (large.experts < 8 || large.experts > 4096) {
    GTEST_SKIP() << "no checkpoint of a handy size takes two thirds of " << free << " bytes";
  }
  ASSERT_EQ(WriteTestCheckpoint(dir / "model", large), absl::OkStatus());
  const auto alone = PlanWith({}, Spec(dir / "model", dir / "x"));
  ASSERT_TRUE(alone.ok()) << alone.status();
  EXPECT_EQ((*alone)->CheckRoom(*(*alone)->Inspect()), absl::OkStatus());
  const auto both = PlanWith({}, SpecOfTwo(dir / "model", dir / "x", dir / "y"));
  ASSERT_TRUE(both.ok()) << both.status();
  const absl::Status refused = (*both)->CheckRoom(*(*both)->Inspect());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused).reason, "NO_SPACE");
  EXPECT_EQ(ReasonOf(refused).metadata["needed_bytes"],
            std::to_string((*both)->facts().summary.joint().output_bytes()));
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("destinations " + (dir / "x") + ", " + (dir / "y") + ": "));
  EXPECT_FALSE(std::filesystem::exists(dir / "y"));
}

TEST(ControllerHost, OffLoopbackItNeedsAllowListsAndSecurity) {
  ControllerHostOptions options;
  options.listen = {"0.0.0.0:0"};
  options.security.allow_insecure = true;
  const absl::Status open = ControllerHost::Start(options).status();
  EXPECT_EQ(open.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(open.message()), HasSubstr("--allow-source"));
  options.allow_source = {"/models"};
  options.allow_destination = {"/prepared"};
  EXPECT_TRUE(ControllerHost::Start(options).ok());
  options.security.allow_insecure = false;
  EXPECT_EQ(ControllerHost::Start(options).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ControllerHost, ADeviceThatNoWorkerKnowsIsRefusedAtStart) {
  for (const char* device : {"foo", "hip:x", ""}) {
    ControllerHostOptions options;
    options.listen = {"127.0.0.1:0"};
    options.device = device;
    const absl::Status refused = ControllerHost::Start(options).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << device;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("want cpu, hip, hip:N, auto or auto:N"));
  }
}

TEST(ControllerHost, NumbersAreChecked) {
  const auto refuse = [](const char* what, const auto& change) {
    ControllerHostOptions options;
    options.listen = {"127.0.0.1:0"};
    change(options);
    EXPECT_EQ(ControllerHost::Start(options).status().code(), absl::StatusCode::kInvalidArgument)
        << what;
  };
  refuse("workers", [](auto& o) { o.local_workers = -1; });
  refuse("lease", [](auto& o) { o.lease_duration = absl::Seconds(19); });
  refuse("budget", [](auto& o) { o.memory_budget_bytes = 0; });
  refuse("jobs", [](auto& o) { o.max_queued_jobs = 0; });
  refuse("allowed", [](auto& o) { o.allow_source = {"relative/path"}; });
}

// Creates a job and follows it to its end.
absl::StatusOr<v1::PrepJob> RunJob(PrepClient& client, const std::string& id,
                                   const v1::PrepJobSpec& spec) {
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id(id);
  *request.mutable_spec() = spec;
  absl::StatusOr<v1::PrepJob> job = client.Create(request);
  if (!job.ok()) return job;
  absl::Status watched = client.Watch(id, [&](const v1::PrepJob& state) {
    job = state;
    return true;
  });
  if (!watched.ok()) return watched;
  return job;
}

class StateDirectoryTest : public testing::Test {
 protected:
  ControllerHostOptions Options(const std::string& socket) {
    ControllerHostOptions options;
    options.listen = {"unix:" + (dir_ / socket)};
    options.state_directory = dir_ / "state";
    options.lease_duration = absl::Seconds(20);
    options.local_workers = 1;
    options.device = "cpu";
    options.worker_program = SHARDPREP_WORKER;
    return options;
  }

  TempDir dir_;
};

TEST_F(StateDirectoryTest, SecondControllerOnItIsRefusedAndTheFirstGoesOn) {
  ASSERT_EQ(WriteTestCheckpoint(dir_ / "model", {}), absl::OkStatus());
  const auto first = ControllerHost::Start(Options("one"));
  ASSERT_TRUE(first.ok()) << first.status();
  const absl::Status second = ControllerHost::Start(Options("two")).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.message()), HasSubstr(dir_ / "state"));
  const auto client = *PrepClient::Make((*first)->addresses()[0]);
  const auto job = RunJob(*client, "a", Spec(dir_ / "model", dir_ / "out"));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state(), v1::PrepJob::STATE_SUCCEEDED) << job->error().message();
}

TEST_F(StateDirectoryTest, JobsAreKnownToTheNextControllerThere) {
  ASSERT_EQ(WriteTestCheckpoint(dir_ / "model", {}), absl::OkStatus());
  v1::PrepJob before;
  {
    const auto host = ControllerHost::Start(Options("one"));
    ASSERT_TRUE(host.ok()) << host.status();
    const auto client = *PrepClient::Make((*host)->addresses()[0]);
    const auto job = RunJob(*client, "a", Spec(dir_ / "model", dir_ / "out"));
    ASSERT_TRUE(job.ok()) << job.status();
    before = *job;
    (*host)->Drain(absl::Seconds(20));
  }
  const auto host = ControllerHost::Start(Options("one"));
  ASSERT_TRUE(host.ok()) << host.status();
  const auto client = *PrepClient::Make((*host)->addresses()[0]);
  const absl::StatusOr<v1::PrepJob> after = client->Get("a");
  ASSERT_TRUE(after.ok()) << after.status();
  EXPECT_EQ(after->state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(after->manifest().sha256(), before.manifest().sha256());
  EXPECT_EQ(after->end_time().seconds(), before.end_time().seconds());
  EXPECT_EQ(RunJob(*client, "a", Spec(dir_ / "model", dir_ / "out"))->end_time().seconds(),
            before.end_time().seconds());
}

TEST_F(StateDirectoryTest, CancelStopsAWorkerThatIsAtIt) {
  // Sparse: hours of work for a test, of which it does a second's.
  CheckpointSpec large;
  large.hidden = large.intermediate = 4096;
  large.experts = 32;
  large.layers = 4;
  large.sparse = true;
  ASSERT_EQ(WriteTestCheckpoint(dir_ / "model", large), absl::OkStatus());
  const auto host = ControllerHost::Start(Options("one"));
  ASSERT_TRUE(host.ok()) << host.status();
  const auto client = *PrepClient::Make((*host)->addresses()[0]);
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id("a");
  *request.mutable_spec() = Spec(dir_ / "model", dir_ / "out");
  ASSERT_TRUE(client->Create(request).ok());
  absl::Time cancelled = absl::InfiniteFuture();
  v1::PrepJob last;
  const absl::Status watched = client->Watch("a", [&](const v1::PrepJob& job) {
    last = job;
    if (job.progress().bytes_written() > 0 && cancelled == absl::InfiniteFuture()) {
      cancelled = absl::Now();
      EXPECT_TRUE(client->Cancel("a").ok());
      EXPECT_LT(absl::Now() - cancelled, absl::Seconds(1)) << "it answers at once";
    }
    return true;
  });
  EXPECT_EQ(watched, absl::OkStatus());
  EXPECT_EQ(last.state(), v1::PrepJob::STATE_CANCELLED) << last.error().message();
  const absl::Duration took = absl::Now() - cancelled;
  RecordProperty("cancel_ms", static_cast<int>(absl::ToInt64Milliseconds(took)));
  // The worker hears within half a second and looks between blocks. The rest is for machines that
  // are busy with other tests.
  EXPECT_LT(took, absl::Seconds(10));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out/_shardprep"));
}

class PrivateControllerTest : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(WriteTestCheckpoint(dir_ / "model", {}), absl::OkStatus());
    auto controller =
        PrivateController::Start({.device = "cpu", .worker_program = SHARDPREP_WORKER});
    ASSERT_TRUE(controller.ok()) << controller.status();
    controller_ = *std::move(controller);
    client_ = *PrepClient::Make(controller_->address());
  }

  absl::StatusOr<v1::PrepJob> Run(const std::string& id, const v1::PrepJobSpec& spec) {
    return RunJob(*client_, id, spec);
  }

  TempDir dir_;
  std::unique_ptr<PrivateController> controller_;
  std::unique_ptr<PrepClient> client_;
};

TEST_F(PrivateControllerTest, RunsAJobAndThenFindsItDone) {
  const absl::StatusOr<v1::PrepJob> job = Run("first", Spec(dir_ / "model", dir_ / "out"));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->state(), v1::PrepJob::STATE_SUCCEEDED) << job->error().message();
  EXPECT_EQ(job->progress().rank_tasks_done(), job->progress().rank_tasks_total());
  EXPECT_THAT(job->progress().device(), HasSubstr("cpu"));
  EXPECT_TRUE(std::filesystem::exists(dir_ / "out/manifest.json"));
  EXPECT_FALSE(std::filesystem::exists(dir_ / "out/_shardprep"));
  const absl::StatusOr<v1::PrepJob> again = Run("second", Spec(dir_ / "model", dir_ / "out"));
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_EQ(again->progress().bytes_read(), 0);
  EXPECT_EQ(again->manifest().sha256(), job->manifest().sha256());
}

TEST_F(PrivateControllerTest, TargetThatIsCompleteIsLeftAsItIs) {
  const absl::StatusOr<v1::PrepJob> first = Run("first", Spec(dir_ / "model", dir_ / "x"));
  ASSERT_TRUE(first.ok()) << first.status();
  ASSERT_EQ(first->state(), v1::PrepJob::STATE_SUCCEEDED) << first->error().message();
  const v1::PrepJobSpec spec = SpecOfTwo(dir_ / "model", dir_ / "x", dir_ / "y");
  const auto planned = PlanWith({}, spec);
  ASSERT_TRUE(planned.ok()) << planned.status();
  const auto found = (*planned)->Inspect();
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_TRUE(found->complete.empty());
  for (const RegionTasks& region : found->regions) {
    std::vector<int32_t> of_first;
    for (const int32_t rank : region.ranks) {
      if (rank == -1 || rank == 0 || rank == 1) of_first.push_back(rank);
    }
    EXPECT_THAT(region.done, UnorderedElementsAreArray(of_first));
  }
  EXPECT_EQ((*planned)->CheckRoom(*found), absl::OkStatus());
  EXPECT_EQ((*planned)->ClearLeftovers(), absl::OkStatus());
  EXPECT_EQ((*planned)->RemoveUnrecorded(), absl::OkStatus());
  EXPECT_EQ((*planned)->RemoveOutput(), absl::OkStatus());
  EXPECT_FALSE(std::filesystem::exists(dir_ / "x/_shardprep"));

  const absl::StatusOr<v1::PrepJob> both = Run("both", spec);
  ASSERT_TRUE(both.ok()) << both.status();
  ASSERT_EQ(both->state(), v1::PrepJob::STATE_SUCCEEDED) << both->error().message();
  EXPECT_EQ(both->manifest().sha256(), first->manifest().sha256());
  EXPECT_EQ(both->progress().rank_tasks_resumed(), first->progress().rank_tasks_total());
  ASSERT_EQ(both->other_manifests_size(), 1);
  EXPECT_EQ(client_->GetManifest("both", 1)->uri(), dir_ / "y/manifest.json");
  const absl::StatusOr<v1::PrepJob> again = Run("again", spec);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(again->progress().bytes_read(), 0);
  EXPECT_EQ(again->other_manifests(0).sha256(), both->other_manifests(0).sha256());
}

TEST_F(PrivateControllerTest, StopRemovesItsSocket) {
  const std::string socket = controller_->address().substr(5);
  EXPECT_EQ(::access(socket.c_str(), F_OK), 0);
  controller_->Stop(absl::Seconds(10));
  EXPECT_NE(::access(socket.c_str(), F_OK), 0);
  EXPECT_FALSE(std::filesystem::exists(std::filesystem::path(socket).parent_path()));
}

}  // namespace
}  // namespace shardprep
