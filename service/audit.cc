#include "service/audit.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "service/job_queue_types.h"
#include "workers/log.h"

namespace shardprep {
namespace {

constexpr char kComponent[] = "audit";
// Of what a caller may have sent in any length.
constexpr size_t kMaxTextBytes = 4096;

std::string Cut(const std::string& text) { return text.substr(0, kMaxTextBytes); }

std::string PlaceOf(const std::string& uri) { return Cut(UriWithoutSecrets(uri)); }

std::string CodeOf(const absl::Status& status) { return absl::StatusCodeToString(status.code()); }

std::string DescribeTarget(const v1::Target& target) {
  const v1::KernelTarget& kernel = target.kernel_target();
  const v1::ParallelLayout& parallel = target.parallel_layout();
  return Cut(absl::StrCat(kernel.backend(), "/", kernel.activation(), "/", kernel.architecture(),
                          "/", kernel.profile(), ",tp=", parallel.tensor_parallel_size(), ",dp=",
                          parallel.data_parallel_size(), ",ep=", parallel.expert_parallel_size()));
}

}  // namespace

void AuditCreate(const std::string& who, const v1::CreatePrepJobRequest& request,
                 const absl::Status& answer) {
  const v1::PrepJobSpec& spec = request.spec();
  std::vector<std::string> destinations;
  std::vector<std::string> targets;
  for (int i = 0; i < std::min(spec.targets_size(), kMaxTargets); ++i) {
    destinations.push_back(PlaceOf(spec.targets(i).destination_uri()));
    targets.push_back(DescribeTarget(spec.targets(i)));
  }
  Log(LogLevel::kAudit, kComponent, "CreatePrepJob",
      {{"who", who},
       {"job", Cut(request.prep_job_id())},
       {"source", PlaceOf(spec.source_uri())},
       {"destinations", absl::StrJoin(destinations, " ")},
       {"targets", absl::StrJoin(targets, " ")},
       {"outcome", CodeOf(answer)}});
}

void AuditCancel(const std::string& who, const std::string& job_id, const absl::Status& answer) {
  Log(LogLevel::kAudit, kComponent, "CancelPrepJob",
      {{"who", who}, {"job", Cut(job_id)}, {"outcome", CodeOf(answer)}});
}

void AuditRefusal(const std::string& who, const std::string& method, const absl::Status& answer) {
  Log(LogLevel::kAudit, kComponent, method, {{"who", who}, {"outcome", CodeOf(answer)}});
}

void AuditEnd(const std::string& job_id, v1::PrepJob::State state, const absl::Status& error) {
  Log(LogLevel::kAudit, kComponent, "job ended",
      {{"job", job_id}, {"state", v1::PrepJob::State_Name(state)}, {"outcome", CodeOf(error)}});
}

}  // namespace shardprep
