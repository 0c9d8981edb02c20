// The services over real connections: a server on a Unix socket or a loopback port, real clients,
// a fake backend behind the controller.
#include "service/server.h"

#include <gmock/gmock.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "service/audit.h"
#include "service/client.h"
#include "shardprep/v1/prep.grpc.pb.h"
#include "shardprep/v1/worker.grpc.pb.h"
#include "tests/service/controller_fixture.h"
#include "tests/service/test_certificates.h"
#include "tests/support/temp_dir.h"
#include "workers/grpc_status.h"
#include "workers/log.h"

namespace shardprep {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class ServerTest : public ControllerFixture {
 protected:
  void SetUp() override {
    StartController(Options());
    StartServer({.listen = {"127.0.0.1:0"}});
  }

  void TearDown() override { server_.reset(); }

  void StartServer(const ServerOptions& options) {
    absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options, controller_.get());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->SetReady(true);
    absl::StatusOr<std::unique_ptr<PrepClient>> client =
        PrepClient::Make(server_->addresses()[0], options.security);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
    channel_ = *MakeChannel(server_->addresses()[0], options.security);
  }

  absl::StatusOr<v1::PrepJob> CreateOverWire(const std::string& id, const v1::PrepJobSpec& spec) {
    v1::CreatePrepJobRequest request;
    request.set_prep_job_id(id);
    *request.mutable_spec() = spec;
    return client_->Create(request);
  }

  // SERVING is 1, NOT_SERVING 2; the status's code when the call fails. HealthCheckRequest has one
  // string field 1 and HealthCheckResponse one enum field 1, as these two messages have.
  absl::StatusOr<int> Health(const std::string& name) {
    grpc::TemplatedGenericStub<v1::GetPrepJobRequest, v1::RankTask> stub(channel_);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    v1::GetPrepJobRequest request;
    request.set_prep_job_id(name);
    v1::RankTask response;
    grpc::Status status;
    absl::Notification done;
    stub.UnaryCall(&context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request,
                   &response, [&](const grpc::Status& s) {
                     status = s;
                     done.Notify();
                   });
    done.WaitForNotification();
    if (!status.ok()) return FromGrpcStatus(status);
    return response.rank();
  }

  // A worker's call with its own deadline.
  absl::StatusOr<v1::SynchronizeResponse> SynchronizeOverWire(
      const v1::SynchronizeRequest& request, absl::Duration deadline = absl::Seconds(20)) {
    const auto stub = v1::WorkerService::NewStub(channel_);
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + deadline));
    v1::SynchronizeResponse response;
    const grpc::Status status = stub->Synchronize(&context, request, &response);
    if (!status.ok()) return FromGrpcStatus(status);
    return response;
  }

  std::unique_ptr<Server> server_;
  std::unique_ptr<PrepClient> client_;
  std::shared_ptr<grpc::Channel> channel_;
};

TEST_F(ServerTest, CreateIsIdempotentById) {
  const absl::StatusOr<v1::PrepJob> job = CreateOverWire("a", Spec("/models/a", "/out/a"));
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->prep_job_id(), "a");
  const absl::StatusOr<v1::PrepJob> again = CreateOverWire("a", Spec("/models/a", "/out/a"));
  ASSERT_TRUE(again.ok());
  EXPECT_EQ(again->create_time().nanos(), job->create_time().nanos());
  const absl::Status other = CreateOverWire("a", Spec("/models/b", "/out/a")).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(ReasonOf(other).reason, "JOB_ID_TAKEN");
  EXPECT_EQ(ReasonOf(other).metadata["prep_job_id"], "a");
}

TEST_F(ServerTest, UnknownJobsAreNotFound) {
  EXPECT_EQ(client_->Get("none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->Cancel("none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->GetManifest("none", 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->Watch("none", [](const v1::PrepJob&) { return true; }).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(client_->Get("none").status()).reason, "JOB_NOT_FOUND");
}

TEST_F(ServerTest, ManifestsAreAskedForByTarget) {
  const v1::PrepJobSpec spec = SpecOfSeveral("/models/a", {"/out/x", "/out/y"});
  backend_.PutArtefact("/out/x", FakeBackend::FingerprintOf(spec, 0));
  backend_.PutArtefact("/out/y", FakeBackend::FingerprintOf(spec, 1));
  ASSERT_TRUE(CreateOverWire("a", spec).ok());
  EXPECT_EQ(client_->GetManifest("a", 0)->uri(), "/out/x/manifest.json");
  EXPECT_EQ(client_->GetManifest("a", 1)->uri(), "/out/y/manifest.json");
  const absl::Status refused = client_->GetManifest("a", 2).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("2 targets"));
}

TEST_F(ServerTest, PlanAnswersOverTheWire) {
  v1::PlanPrepJobRequest request;
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  const absl::StatusOr<v1::PlanSummary> plan = client_->Plan(request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->rank_count(), 2);
  backend_.Fail({.plan = absl::InvalidArgumentError("intermediate 3072: want T of 1, 2, 4")});
  EXPECT_THAT(std::string(client_->Plan(request).status().message()), HasSubstr("want T of"));
}

TEST_F(ServerTest, PagesCoverAllJobs) {
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(
        CreateOverWire(absl::StrCat("j", i), Spec("/models/a", absl::StrCat("/out/", i))).ok());
  }
  std::vector<std::string> ids;
  v1::ListPrepJobsRequest request;
  request.set_page_size(2);
  do {
    const absl::StatusOr<v1::ListPrepJobsResponse> page = client_->List(request);
    ASSERT_TRUE(page.ok()) << page.status();
    for (const v1::PrepJob& job : page->prep_jobs()) ids.push_back(job.prep_job_id());
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(ids, ElementsAre("j4", "j3", "j2", "j1", "j0"));
}

TEST_F(ServerTest, WatchSendsThePresentStateFirstAndEndsAfterTheLast) {
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  std::vector<v1::PrepJob::State> states;
  absl::Notification first;
  absl::Status status;
  std::thread watcher([&] {
    status = client_->Watch("a", [&](const v1::PrepJob& job) {
      if (states.empty()) first.Notify();
      if (states.empty() || states.back() != job.state()) states.push_back(job.state());
      return true;
    });
  });
  // Nothing moves without a worker, so the first state is the present one.
  first.WaitForNotification();
  WorkUntilDone("w", "a");
  watcher.join();
  EXPECT_EQ(status, absl::OkStatus());
  EXPECT_EQ(states.back(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_NE(states.front(), v1::PrepJob::STATE_SUCCEEDED);
  // Watching a finished job tells its end.
  states.clear();
  EXPECT_EQ(client_->Watch("a",
                           [&](const v1::PrepJob& job) {
                             states.push_back(job.state());
                             return true;
                           }),
            absl::OkStatus());
  EXPECT_THAT(states, ElementsAre(v1::PrepJob::STATE_SUCCEEDED));
}

TEST_F(ServerTest, EndingAWatchDoesNotTouchTheJob) {
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  EXPECT_EQ(client_->Watch("a", [](const v1::PrepJob&) { return false; }).code(),
            absl::StatusCode::kCancelled);
  EXPECT_FALSE(client_->Get("a")->cancel_requested());
  WorkUntilDone("w", "a");
}

TEST_F(ServerTest, CancelAnswersAtOnceAndShows) {
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  const absl::StatusOr<v1::PrepJob> job = client_->Cancel("a");
  ASSERT_TRUE(job.ok());
  EXPECT_TRUE(job->cancel_requested());
  EXPECT_EQ(AwaitState("a", v1::PrepJob::STATE_CANCELLED).state(), v1::PrepJob::STATE_CANCELLED);
  ASSERT_TRUE(CreateOverWire("b", Spec("/models/b", "/out/b")).ok());
  WorkUntilDone("w", "b");
  const absl::Status late = client_->Cancel("b").status();
  EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(late).metadata["state"], "STATE_SUCCEEDED");
}

TEST_F(ServerTest, IdleWorkersCallIsHeldUntilThereIsWork) {
  absl::StatusOr<v1::SynchronizeResponse> response;
  std::thread worker([&] { response = SynchronizeOverWire(Request("w")); });
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  worker.join();
  ASSERT_TRUE(response.ok()) << response.status();
  ASSERT_EQ(response->leases_size(), 1);
  EXPECT_EQ(response->leases(0).spec().source_uri(), "/models/a");
  EXPECT_TRUE(response->leases(0).has_region());
}

TEST_F(ServerTest, HeldCallIsAnsweredBeforeItsDeadline) {
  // The margin is a second, so this one is not held at all.
  EXPECT_TRUE(SynchronizeOverWire(Request("w"), absl::Milliseconds(900)).ok());
}

TEST_F(ServerTest, WorkerOfAnotherBuildIsRefused) {
  v1::SynchronizeRequest request = Request("w");
  request.mutable_build()->set_policy_digest("other");
  const absl::Status status = SynchronizeOverWire(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status).reason, "BUILD_MISMATCH");
}

TEST_F(ServerTest, OversizedFieldsAndMessagesAreRefused) {
  v1::PrepJobSpec spec = Spec(std::string(4097, 'x'), "/out/a");
  EXPECT_EQ(CreateOverWire("a", spec).status().code(), absl::StatusCode::kInvalidArgument);
  spec = Spec("/models/a", "/out/a");
  while (spec.targets_size() <= 16) *spec.add_targets() = spec.targets(0);
  EXPECT_EQ(CreateOverWire("a", spec).status().code(), absl::StatusCode::kInvalidArgument);
  spec = Spec("/models/a", "/out/a");
  spec.set_alignment_policy_json(std::string(5 << 20, ' '));
  EXPECT_EQ(CreateOverWire("a", spec).status().code(), absl::StatusCode::kResourceExhausted);
}

TEST_F(ServerTest, MalformedIdsAreRefusedWhateverTheirSize) {
  for (const std::string& id : {std::string(), std::string("A"), std::string(1 << 20, 'a')}) {
    const absl::Status statuses[] = {client_->Get(id).status(), client_->Cancel(id).status(),
                                     client_->GetManifest(id, 0).status(),
                                     client_->Watch(id, [](const v1::PrepJob&) { return true; })};
    for (const absl::Status& status : statuses) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << id.size() << status;
      EXPECT_EQ(ReasonOf(status).reason, "BAD_JOB_ID");
    }
  }
}

TEST_F(ServerTest, TimeoutsAreChecked) {
  v1::CreatePrepJobRequest request;
  request.set_prep_job_id("a");
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  const std::pair<int64_t, int32_t> bad[] = {
      {0, 0}, {-1, 0}, {0, 999'999}, {366 * 86'400, 1}, {1, -1}, {1, 1'000'000'000}};
  for (const auto& [seconds, nanos] : bad) {
    request.mutable_timeout()->set_seconds(seconds);
    request.mutable_timeout()->set_nanos(nanos);
    EXPECT_EQ(client_->Create(request).status().code(), absl::StatusCode::kInvalidArgument)
        << seconds << " " << nanos;
  }
  request.mutable_timeout()->set_seconds(3);
  request.mutable_timeout()->set_nanos(5);
  const absl::StatusOr<v1::PrepJob> job = client_->Create(request);
  ASSERT_TRUE(job.ok()) << job.status();
  EXPECT_EQ(job->timeout().seconds(), 3);
  EXPECT_EQ(job->deadline_time().seconds(), job->create_time().seconds() + 3);
}

TEST_F(ServerTest, LongErrorsReachAClientWithDefaultLimits) {
  std::string names;
  while (names.size() < 20'000) names += absl::StrCat("layers.", names.size(), ".w\u00fc; ");
  backend_.Fail({.plan = WithReason(absl::NotFoundError(absl::StrCat("missing: ", names)),
                                    "TENSORS_MISSING", {{"names", names}})});
  v1::PlanPrepJobRequest request;
  *request.mutable_spec() = Spec("/models/a", "/out/a");
  const absl::Status status = client_->Plan(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("missing: layers.0.w"));
  EXPECT_EQ(ReasonOf(status).reason, "TENSORS_MISSING");
}

TEST_F(ServerTest, PagesOfLargeJobsFitAMessage) {
  for (int i = 0; i < 300; ++i) {
    ASSERT_TRUE(Create(absl::StrCat("j", i), Spec(absl::StrCat("/models/", std::string(4000, 'm')),
                                                  absl::StrCat("/out/", std::string(4000, 'o'), i)))
                    .ok());
  }
  v1::ListPrepJobsRequest request;
  request.set_page_size(1000);
  int found = 0;
  int pages = 0;
  do {
    const absl::StatusOr<v1::ListPrepJobsResponse> page = client_->List(request);
    ASSERT_TRUE(page.ok()) << page.status();
    EXPECT_LT(page->ByteSizeLong(), 2U << 20);
    found += page->prep_jobs_size();
    ++pages;
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  EXPECT_EQ(found, 300);
  EXPECT_GE(pages, 2);
}

// One of many calls at once that are answered by callback.
struct PendingCreate {
  grpc::ClientContext context;
  v1::CreatePrepJobRequest request;
  v1::PrepJob response;
  grpc::Status status;
  absl::Notification done;
};

TEST_F(ServerTest, FloodOfCreatesIsRefusedBeyondTheBoundAndTheRestGoesThrough) {
  backend_.Hold();
  const auto stub = v1::PrepService::NewStub(channel_);
  std::vector<std::unique_ptr<PendingCreate>> calls;
  for (int i = 0; i < 400; ++i) {
    calls.push_back(std::make_unique<PendingCreate>());
    PendingCreate& call = *calls.back();
    call.context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    call.request.set_prep_job_id(absl::StrCat("j", i));
    *call.request.mutable_spec() = Spec("/models/a", absl::StrCat("/out/", i));
    call.request.mutable_spec()->set_alignment_policy_json(std::string(64 << 10, ' '));
    stub->async()->CreatePrepJob(&call.context, &call.request, &call.response,
                                 [&call](const grpc::Status& status) {
                                   call.status = status;
                                   call.done.Notify();
                                 });
  }
  const ControllerOptions defaults = Options();
  const int held = defaults.planner_threads + defaults.max_waiting_plans;
  // Those that are refused are answered while the others are held.
  const auto answered = [&] {
    int count = 0;
    for (const auto& call : calls) count += call->done.HasBeenNotified() ? 1 : 0;
    return count;
  };
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  while (answered() < 400 - held && absl::Now() < give_up) std::this_thread::yield();
  EXPECT_EQ(answered(), 400 - held);
  backend_.Release();
  int refused = 0;
  for (const auto& call : calls) {
    call->done.WaitForNotification();
    if (call->status.ok()) continue;
    ++refused;
    const absl::Status status = FromGrpcStatus(call->status);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_EQ(ReasonOf(status).reason, "TOO_MANY_PLANS");
    EXPECT_EQ(ReasonOf(status).metadata["bound"], "64");
  }
  EXPECT_EQ(refused, 400 - held);
}

TEST_F(ServerTest, SlowWatcherSkipsStatesAndGetsTheLast) {
  // Large states, so that few of them fill what the connection buffers.
  ASSERT_TRUE(Create("a", Spec(absl::StrCat("/models/", std::string(4000, 'm')),
                               absl::StrCat("/out/", std::string(4000, 'o'))))
                  .ok());
  const auto stub = v1::PrepService::NewStub(channel_);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
  v1::WatchPrepJobRequest watch;
  watch.set_prep_job_id("a");
  const auto reader = stub->WatchPrepJob(&context, watch);
  v1::PrepJob job;
  ASSERT_TRUE(reader->Read(&job));
  v1::SynchronizeRequest request = Request("w");
  absl::StatusOr<v1::SynchronizeResponse> response = Synchronize(request);
  ASSERT_EQ(response->leases_size(), 1);
  v1::LeaseReport& report = *request.add_leases();
  report.set_lease_id(response->leases(0).lease_id());
  report.set_state(v1::LeaseReport::STATE_RUNNING);
  constexpr int kChanges = 2000;
  for (int i = 1; i <= kChanges; ++i) {
    report.set_bytes_read(i);
    ASSERT_TRUE(Synchronize(request).ok());
  }
  report.set_state(v1::LeaseReport::STATE_DONE);
  response = Synchronize(request);
  while (response.ok() && response->leases_size() > 0) {
    report.set_lease_id(response->leases(0).lease_id());
    response = Synchronize(request);
  }
  AwaitState("a", v1::PrepJob::STATE_SUCCEEDED);
  int states = 1;
  while (reader->Read(&job)) ++states;
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_EQ(job.state(), v1::PrepJob::STATE_SUCCEEDED);
  EXPECT_LT(states, kChanges / 4);
}

TEST_F(ServerTest, HealthNamesAreReadinessAndLiveness) {
  for (const char* name : {"", "shardprep.v1.PrepService", "liveness"}) {
    EXPECT_EQ(Health(name).value_or(0), 1) << name;
  }
  EXPECT_EQ(Health("other").status().code(), absl::StatusCode::kNotFound);
  server_->SetReady(false);
  EXPECT_EQ(Health("").value_or(0), 2);
  EXPECT_EQ(Health("shardprep.v1.PrepService").value_or(0), 2);
  EXPECT_EQ(Health("liveness").value_or(0), 1);
}

TEST_F(ServerTest, DrainEndsWatchesWithUnavailable) {
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  absl::Notification watching;
  absl::Status watch_status;
  std::thread watcher([&] {
    bool told = false;
    watch_status = client_->Watch(
        "a",
        [&](const v1::PrepJob&) {
          if (!told) watching.Notify();
          told = true;
          return true;
        },
        absl::ZeroDuration());
  });
  watching.WaitForNotification();
  controller_->EndStreams();
  watcher.join();
  EXPECT_EQ(watch_status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(watch_status).reason, "DRAINING");
  const absl::Status refused = SynchronizeOverWire(Request("w")).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  server_->Shutdown(absl::Seconds(5));
}

TEST_F(ServerTest, ShutdownWaitsForNoOneBeyondItsGrace) {
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  absl::Notification watching;
  std::thread watcher([&] {
    bool told = false;
    (void)client_->Watch(
        "a",
        [&](const v1::PrepJob&) {
          if (!told) watching.Notify();
          told = true;
          return true;
        },
        absl::ZeroDuration());
  });
  watching.WaitForNotification();
  const absl::Time begin = absl::Now();
  server_->Shutdown(absl::Milliseconds(100));  // the watch is still open
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
  watcher.join();
}

TEST_F(ServerTest, TakenPortIsUnavailable) {
  const auto second = Server::Start({.listen = {server_->addresses()[0]}}, controller_.get());
  EXPECT_EQ(second.status().code(), absl::StatusCode::kUnavailable) << second.status();
}

TEST_F(ServerTest, PlaintextOffLoopbackIsRefused) {
  EXPECT_EQ(Server::Start({.listen = {"0.0.0.0:0"}}, controller_.get()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(ServerTest, UnixSocketServesAndIsRemoved) {
  const TempDir directory;
  const std::string path = directory / "socket";
  StartServer({.listen = {"unix:" + path}});
  EXPECT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  server_.reset();
  EXPECT_NE(::access(path.c_str(), F_OK), 0);
}

// Lines of a log at the level `audit`, without their time.
std::vector<std::string> AuditLines(const std::string& log) {
  std::vector<std::string> lines;
  for (const absl::string_view line : absl::StrSplit(log, '\n')) {
    if (!absl::StartsWith(line, "level=audit ")) continue;
    lines.emplace_back(line.substr(line.find("msg=")));
  }
  return lines;
}

TEST_F(ServerTest, CreateAndCancelLeaveAnAuditLineWhateverTheLogLevel) {
  SetLeastLogLevel(LogLevel::kError);
  ::testing::internal::CaptureStderr();
  ASSERT_TRUE(CreateOverWire("a", Spec("/models/a", "/out/a")).ok());
  EXPECT_FALSE(CreateOverWire("a", Spec("/models/b", "/out/a")).ok());
  EXPECT_FALSE(CreateOverWire("BAD\nid", Spec("s3://key:hunter2@models/b?sig=hunter2", "/c")).ok());
  EXPECT_TRUE(client_->Cancel("a").ok());
  AwaitState("a", v1::PrepJob::STATE_CANCELLED);
  EXPECT_FALSE(client_->Cancel("none").ok());
  // Joins the threads that write the lines.
  server_.reset();
  controller_.reset();
  const std::string log = ::testing::internal::GetCapturedStderr();
  SetLeastLogLevel(LogLevel::kInfo);
  const std::vector<std::string> lines = AuditLines(log);
  EXPECT_THAT(lines, Contains(AllOf(StartsWith("msg=CreatePrepJob who=loopback job=a "
                                               "source=/models/a destinations=/out/a"),
                                    EndsWith(" outcome=OK"))));
  EXPECT_THAT(lines, Contains(AllOf(StartsWith("msg=CreatePrepJob who=loopback job=a "
                                               "source=/models/b"),
                                    EndsWith(" outcome=ALREADY_EXISTS"))));
  EXPECT_THAT(lines, Contains(AllOf(HasSubstr("job=\"BAD\\nid\" source=s3://models/b dest"),
                                    EndsWith(" outcome=INVALID_ARGUMENT"))));
  EXPECT_THAT(lines, Contains("msg=CancelPrepJob who=loopback job=a outcome=OK"));
  EXPECT_THAT(lines, Contains("msg=CancelPrepJob who=loopback job=none outcome=NOT_FOUND"));
  EXPECT_THAT(lines, Contains("msg=\"job ended\" job=a state=STATE_CANCELLED outcome=OK"));
  EXPECT_THAT(log, Not(HasSubstr("hunter2")));
}

TEST_F(ServerTest, ProbesHaveAPortOfTheirOwnWithNothingElse) {
  const TestCertificates certificates;
  StartServer({.listen = {"127.0.0.1:0"},
               .security = certificates.Security(),
               .health_listen = "127.0.0.1:0"});
  channel_ = *MakeChannel(server_->health_address(), {});
  server_->SetReady(false);
  EXPECT_EQ(Health("").value_or(0), 2);
  EXPECT_EQ(Health("liveness").value_or(0), 1);
  server_->SetReady(true);
  EXPECT_EQ(Health("").value_or(0), 1);
  EXPECT_EQ(Health("shardprep.v1.PrepService").value_or(0), 1);
  // No other service answers there, whoever asks.
  EXPECT_EQ(SynchronizeOverWire(Request("w")).status().code(), absl::StatusCode::kUnimplemented);
  const auto client = PrepClient::Make(server_->health_address());
  EXPECT_EQ((*client)->Get("a").status().code(), absl::StatusCode::kUnimplemented);
  grpc::TemplatedGenericStub<v1::GetPrepJobRequest, v1::RankTask> stub(channel_);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
  absl::Notification done;
  grpc::Status status;
  v1::GetPrepJobRequest request;
  v1::RankTask response;
  stub.UnaryCall(&context, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                 grpc::StubOptions(), &request, &response, [&](const grpc::Status& s) {
                   status = s;
                   done.Notify();
                 });
  done.WaitForNotification();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

}  // namespace
}  // namespace shardprep
