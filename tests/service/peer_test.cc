// Who may call what: patterns, and certificates over real connections.
#include "service/peer.h"

#include <gmock/gmock.h>
#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "service/server.h"
#include "shardprep/v1/prep.grpc.pb.h"
#include "shardprep/v1/worker.grpc.pb.h"
#include "tests/service/controller_fixture.h"
#include "tests/service/test_certificates.h"
#include "workers/grpc_status.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

TEST(NamePattern, StarIsWithinOneLabelOrSegment) {
  const struct {
    std::string pattern, name;
    bool fits;
  } cases[] = {
      {"worker", "worker", true},
      {"worker", "worker2", false},
      {"worker", "a-worker", false},
      {"*", "worker", true},
      {"*", "worker.example", false},
      {"*", "", false},
      {"*.gpu.example", "node7.gpu.example", true},
      {"*.gpu.example", "a.node7.gpu.example", false},
      {"*.gpu.example", ".gpu.example", false},
      {"*.gpu.example", "node7.gpu.example.evil", false},
      {"node-*", "node-7", true},
      {"node-*-gpu", "node-7-0-gpu", true},
      {"node-*-gpu", "node--gpu", false},
      {"spiffe://c/ns/*/sa/worker", "spiffe://c/ns/prep/sa/worker", true},
      {"spiffe://c/ns/*/sa/worker", "spiffe://c/ns/a/sa/x/sa/worker", false},
      {"127.0.0.1", "127.0.0.1", true},
  };
  for (const auto& [pattern, name, fits] : cases) {
    EXPECT_EQ(FitsNamePattern(pattern, name), fits) << pattern << " " << name;
  }
}

TEST(PeerPolicy, HalfAPolicyIsNone) {
  const TestCertificates certificates;
  const ConnectionSecurity tls = certificates.Security();
  EXPECT_TRUE(PeerPolicy::Make({}, {}).ok());
  EXPECT_TRUE(PeerPolicy::Make({.callers = {"a"}, .workers = {"b"}}, tls).ok());
  const std::pair<RoleNames, absl::StatusCode> bad[] = {
      {{.callers = {"a"}, .workers = {}}, absl::StatusCode::kInvalidArgument},
      {{.callers = {}, .workers = {"b"}}, absl::StatusCode::kInvalidArgument},
      {{.callers = {"a", ""}, .workers = {"b"}}, absl::StatusCode::kInvalidArgument},
      {{.callers = {"a b"}, .workers = {"b"}}, absl::StatusCode::kInvalidArgument},
      {{.callers = {"**"}, .workers = {"b"}}, absl::StatusCode::kInvalidArgument}};
  for (const auto& [names, code] : bad)
    EXPECT_EQ(PeerPolicy::Make(names, tls).status().code(), code);
  // Without certificates there are no names to go by.
  EXPECT_EQ(PeerPolicy::Make({.callers = {"a"}, .workers = {"b"}}, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

class TlsTest : public ControllerFixture {
 protected:
  void SetUp() override { StartController(Options()); }
  void TearDown() override { server_.reset(); }

  void Start(const RoleNames& roles = {}) {
    auto server = Server::Start(
        {.listen = {"127.0.0.1:0"}, .security = certificates_.Security(), .roles = roles},
        controller_.get());
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    server_->SetReady(true);
  }

  std::shared_ptr<grpc::Channel> Channel(const ConnectionSecurity& security) {
    return *MakeChannel(server_->addresses()[0], security);
  }

  // How a call of each service is answered, by a new connection.
  absl::Status List(const ConnectionSecurity& security, bool wait_for_ready = false) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(60)));
    context.set_wait_for_ready(wait_for_ready);
    v1::ListPrepJobsResponse response;
    return FromGrpcStatus(v1::PrepService::NewStub(Channel(security))
                              ->ListPrepJobs(&context, v1::ListPrepJobsRequest(), &response));
  }
  absl::Status Synchronize(const ConnectionSecurity& security) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    v1::SynchronizeRequest request = Request("w");
    request.set_draining(true);  // so that the call is not held
    v1::SynchronizeResponse response;
    return FromGrpcStatus(
        v1::WorkerService::NewStub(Channel(security))->Synchronize(&context, request, &response));
  }
  // Every method of PrepService, by name.
  std::vector<std::pair<std::string, absl::Status>> CallAll(const ConnectionSecurity& security);

  TestCertificates certificates_;
  std::unique_ptr<Server> server_;
};

std::vector<std::pair<std::string, absl::Status>> TlsTest::CallAll(
    const ConnectionSecurity& security) {
  const auto stub = v1::PrepService::NewStub(Channel(security));
  std::vector<std::pair<std::string, absl::Status>> answers;
  const auto call = [&answers](const std::string& method, const auto& make) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(20)));
    answers.emplace_back(method, FromGrpcStatus(make(&context)));
  };
  v1::PrepJob job;
  v1::CreatePrepJobRequest create;
  create.set_prep_job_id("a");
  *create.mutable_spec() = Spec("/models/a", "/out/a");
  v1::PlanPrepJobRequest plan;
  *plan.mutable_spec() = create.spec();
  v1::PlanSummary summary;
  v1::ListPrepJobsResponse page;
  v1::ManifestReference manifest;
  v1::GetPrepJobRequest get;
  v1::CancelPrepJobRequest cancel;
  v1::GetManifestRequest get_manifest;
  v1::WatchPrepJobRequest watch;
  call("PlanPrepJob", [&](auto* c) { return stub->PlanPrepJob(c, plan, &summary); });
  call("CreatePrepJob", [&](auto* c) { return stub->CreatePrepJob(c, create, &job); });
  call("GetPrepJob", [&](auto* c) { return stub->GetPrepJob(c, get, &job); });
  call("ListPrepJobs", [&](auto* c) { return stub->ListPrepJobs(c, {}, &page); });
  call("CancelPrepJob", [&](auto* c) { return stub->CancelPrepJob(c, cancel, &job); });
  call("GetManifest", [&](auto* c) { return stub->GetManifest(c, get_manifest, &manifest); });
  call("WatchPrepJob", [&](auto* c) { return stub->WatchPrepJob(c, watch)->Finish(); });
  return answers;
}

TEST_F(TlsTest, CallersCannotLeaseAndWorkersCannotCreateJobs) {
  certificates_.Issue("caller", {.common_name = "x", .alternative_names = "DNS:ci.example"});
  certificates_.Issue("worker", {.common_name = "x", .alternative_names = "DNS:n7.gpu.example"});
  Start({.callers = {"ci.example"}, .workers = {"*.gpu.example"}});
  for (const auto& [method, status] : CallAll(certificates_.Security("worker"))) {
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << method << " " << status;
    const std::string message(status.message());
    for (const char* want : {method.c_str(), "role caller", "n7.gpu.example"}) {
      EXPECT_THAT(message, HasSubstr(want));
    }
    EXPECT_EQ(ReasonOf(status).reason, "ROLE_NOT_ALLOWED");
    EXPECT_EQ(ReasonOf(status).metadata["method"], method);
  }
  const absl::Status lease = Synchronize(certificates_.Security("caller"));
  EXPECT_EQ(lease.code(), absl::StatusCode::kPermissionDenied) << lease;
  EXPECT_THAT(std::string(lease.message()), HasSubstr("Synchronize is for the role worker"));
  EXPECT_EQ(List(certificates_.Security("caller")), absl::OkStatus());
  EXPECT_EQ(Synchronize(certificates_.Security("worker")), absl::OkStatus());
  // The calls of a caller reach the controller, whatever it answers.
  for (const auto& [method, status] : CallAll(certificates_.Security("caller"))) {
    EXPECT_NE(status.code(), absl::StatusCode::kPermissionDenied) << method;
  }
  // The controller's own certificate has neither role here.
  EXPECT_EQ(List(certificates_.Security()).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_EQ(Synchronize(certificates_.Security()).code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(TlsTest, TheCommonNameCountsOnlyWithoutOtherNames) {
  certificates_.Issue("plain", {.common_name = "ci.example", .alternative_names = ""});
  certificates_.Issue("other", {.common_name = "ci.example", .alternative_names = "DNS:x.example"});
  certificates_.Issue("uri", {.common_name = "x", .alternative_names = "URI:spiffe://c/sa/ci"});
  Start({.callers = {"ci.example", "spiffe://c/sa/*"}, .workers = {"w"}});
  EXPECT_EQ(List(certificates_.Security("plain")), absl::OkStatus());
  EXPECT_EQ(List(certificates_.Security("uri")), absl::OkStatus());
  EXPECT_EQ(List(certificates_.Security("other")).code(), absl::StatusCode::kPermissionDenied);
}

TEST_F(TlsTest, RefusedCallsLeaveAnAuditLine) {
  certificates_.Issue("worker", {.alternative_names = "DNS:n7.gpu.example"});
  Start({.callers = {"ci.example"}, .workers = {"*.gpu.example"}});
  ::testing::internal::CaptureStderr();
  EXPECT_FALSE(List(certificates_.Security("worker")).ok());
  server_.reset();
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("component=audit msg=ListPrepJobs who=n7.gpu.example "
                        "outcome=PERMISSION_DENIED"));
}

TEST_F(TlsTest, OnlyCertificatesOfTheAuthorityAreLetIn) {
  const TestCertificates others;
  certificates_.Issue("expired", {.expired = true});
  Start();
  EXPECT_EQ(List(certificates_.Security()), absl::OkStatus());
  ConnectionSecurity foreign = others.Security();
  foreign.tls.ca = certificates_.path("ca.pem");  // it would take the server
  for (const ConnectionSecurity& security :
       {foreign, others.Security(), certificates_.Security("expired"), ConnectionSecurity()}) {
    EXPECT_EQ(List(security).code(), absl::StatusCode::kUnavailable) << security.tls.certificate;
  }
}

TEST_F(TlsTest, AnExpiredServerIsRefusedByItsClients) {
  certificates_.Issue("client", {});
  certificates_.Issue("leaf", {.expired = true});
  Start();
  EXPECT_EQ(List(certificates_.Security("client")).code(), absl::StatusCode::kUnavailable);
}

// Certificates and the authority itself change under a running server, as in a mounted Secret.
TEST_F(TlsTest, RotatedFilesAreTakenUpWithoutARestart) {
  Start();
  const TestCertificates next;
  EXPECT_EQ(List(certificates_.Security()), absl::OkStatus());
  EXPECT_FALSE(List(next.Security()).ok());
  const TestCertificates kept;
  for (const char* file : {"leaf.pem", "leaf.key", "ca.pem"}) {
    std::filesystem::copy_file(certificates_.path(file), kept.path(file),
                               std::filesystem::copy_options::overwrite_existing);
  }
  for (const char* file : {"leaf.key", "leaf.pem", "ca.pem"}) {
    const std::string staged = certificates_.path(absl::StrCat(file, ".staged"));
    std::filesystem::copy_file(next.path(file), staged);
    std::filesystem::rename(staged, certificates_.path(file));
  }
  // Tries again until it is let in.
  EXPECT_EQ(List(next.Security(), /*wait_for_ready=*/true), absl::OkStatus());
  EXPECT_FALSE(List(kept.Security()).ok());
}

}  // namespace
}  // namespace shardprep
