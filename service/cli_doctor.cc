// `shardprep doctor`: tries what a job will need, and says what to do about what is missing.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "kernels/device_choice.h"
#include "kernels/profile.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_s3.h"
#include "service/client.h"
#include "service/doctor.h"
#include "workers/open_store.h"
#include "workers/policy_file.h"
#include "workers/s3/s3_client.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "doctor";
constexpr char kHttpDate[] = "%a, %d %b %Y %H:%M:%S GMT";

struct DoctorFlags {
  std::vector<std::string> destinations;
  std::vector<std::string> sources;
  std::string controller;
  ConnectionSecurity security;
  std::string device = "auto";
  std::string backend = "AUTO";
  std::string activation = "SILU";
  std::string architecture = "gfx950";
  std::string profile = "aiter-separated";
  std::string alignment_policy;
  int64_t probe_bytes = int64_t{64} << 20;
  S3CliFlags s3;
};

// Prints findings as they come, so that a slow store shows where it is slow.
class Report {
 public:
  void Add(const Finding& finding) {
    std::printf("%s\n", FindingLine(finding).c_str());
    std::fflush(stdout);
    ++counts_[static_cast<size_t>(finding.verdict)];
  }
  void Add(const std::vector<Finding>& findings) {
    for (const Finding& finding : findings) Add(finding);
  }
  void Add(const std::string& subject, const absl::Status& status, const std::string& fine,
           const std::string& advice) {
    const bool ok = status.ok();
    Add({.verdict = ok ? Verdict::kOk : Verdict::kFail,
         .subject = subject,
         .what = ok ? fine
                    : absl::StrCat(absl::StatusCodeToString(status.code()), ": ",
                                   std::string(status.message())),
         .advice = ok ? "" : advice});
  }
  int Finish() const {
    std::printf("%d ok, %d to look at, %d to put right\n", counts_[0], counts_[1], counts_[2]);
    return counts_[2] == 0 ? kExitOk : kExitFailure;
  }

 private:
  int counts_[3] = {0, 0, 0};
};

std::string ParentOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == 0 ? "/" : path.substr(0, slash);
}

// Directories that a probe makes on its way, so that they can be removed again: `path` and those
// above it that are missing now, the innermost first.
std::vector<std::string> MissingDirectories(std::string path) {
  std::vector<std::string> missing;
  while (path != "/" && ::access(path.c_str(), F_OK) != 0) {
    missing.push_back(path);
    path = ParentOf(path);
  }
  return missing;
}

// Any answer of S3 tells its time, also one that refuses.
void CheckS3Clock(S3Connection& s3, const std::string& uri, Report& report) {
  const std::string place = uri.substr(uri.find("://") + 3);
  S3Call call;
  call.operation = "HeadBucket";
  call.method = "HEAD";
  call.bucket = place.substr(0, place.find('/'));
  const S3Answer answer = s3.Exchange(std::move(call));
  const std::string* const date = answer.response.Header("date");
  absl::Time servers;
  std::string error;
  if (date == nullptr || !absl::ParseTime(kHttpDate, *date, &servers, &error)) {
    report.Add({.verdict = Verdict::kWarn,
                .subject = "clock",
                .what = absl::StrCat(uri, " does not tell the time"),
                .advice = "see that this machine's clock is set by NTP"});
    return;
  }
  report.Add(CheckClock(absl::Now(), servers));
}

void CheckDestination(const CliContext& context, const DoctorFlags& flags, const std::string& text,
                      Report& report) {
  const auto uri = NormalizeUri(text, context.working_directory);
  if (!uri.ok()) return report.Add("destination", uri.status(), "", "give a directory or a URI");
  std::printf("destination %s\n", uri->c_str());
  const auto s3 = flags.s3.Connect(context, {*uri});
  if (!s3.ok()) return report.Add("S3", s3.status(), "", "see the flags --s3-* and AWS_*");
  if (*s3 != nullptr) CheckS3Clock(**s3, *uri, report);
  const bool is_directory = *s3 == nullptr;
  const std::vector<std::string> made =
      is_directory ? MissingDirectories(*uri) : std::vector<std::string>();
  const auto store = OpenStore(*uri, {.create = true, .s3 = *s3});
  if (!store.ok()) return report.Add("destination", store.status(), "", "name another place");
  const std::string id =
      absl::StrFormat("doctor-%d-%d", ::getpid(), absl::ToUnixNanos(absl::Now()) / 1000);
  report.Add(ProbeStore(**store, {.id = id, .size_bytes = flags.probe_bytes}));
  if (*s3 != nullptr) {
    const std::string place = uri->substr(uri->find("://") + 3);
    const std::string bucket = place.substr(0, place.find('/'));
    if ((*s3)->conditional_put(bucket) == ConditionalPut::kMissing) {
      report.Add({.verdict = Verdict::kWarn,
                  .subject = "conditional put",
                  .what = "the server ignores If-None-Match; shardprep looks before it writes",
                  .advice = "run one controller for this bucket"});
    }
  }
  // Only what is empty again: rmdir refuses everything else.
  for (const std::string& path : made) {
    if (::rmdir(path.c_str()) != 0) break;
  }
}

void CheckSource(const CliContext& context, const DoctorFlags& flags, const std::string& text,
                 Report& report) {
  const auto check = [&]() -> absl::Status {
    SP_ASSIGN_OR_RETURN(const std::string uri, NormalizeUri(text, context.working_directory));
    SP_ASSIGN_OR_RETURN(const auto s3, flags.s3.Connect(context, {uri}));
    SP_ASSIGN_OR_RETURN(const auto store, OpenStore(uri, {.s3 = s3}));
    return store->Head("config.json").status();
  };
  report.Add("source", check(), absl::StrCat(text, " can be read"),
             "name a checkpoint with config.json that this user can read");
}

void CheckController(const DoctorFlags& flags, Report& report) {
  const auto check = [&]() -> absl::Status {
    SP_ASSIGN_OR_RETURN(const auto client, PrepClient::Make(flags.controller, flags.security));
    v1::ListPrepJobsRequest request;
    request.set_page_size(1);
    return client->List(request).status();
  };
  report.Add("controller", check(), absl::StrCat(flags.controller, " answers"),
             "see that it runs, that its port is open to this machine, and that both ends have "
             "certificates of one authority");
}

absl::StatusOr<AlignmentPolicy> Policy(const DoctorFlags& flags) {
  if (flags.alignment_policy.empty()) return DefaultAlignmentPolicy().policy;
  SP_ASSIGN_OR_RETURN(PolicyFile file, ReadAlignmentPolicy(flags.alignment_policy));
  return file.policy;
}

void Declare(FlagSet& flags, DoctorFlags& wish) {
  flags.Strings("destination", "URI", "Place to try: objects are written, read and removed there.",
                &wish.destinations);
  flags.Strings("source", "URI", "Checkpoint that must be readable.", &wish.sources);
  flags.Size("probe-size", "Size of the object that is written to measure speed.",
             &wish.probe_bytes);
  flags.String("controller", "ADDR", "Controller that must answer: host:port or unix:/path.",
               &wish.controller);
  flags.String("tls-cert", "FILE", "PEM certificate of this end.", &wish.security.tls.certificate);
  flags.String("tls-key", "FILE", "PEM key of this end.", &wish.security.tls.key);
  flags.String("tls-ca", "FILE", "PEM certificates of the authority.", &wish.security.tls.ca);
  flags.Bool("allow-insecure", "Allows plaintext to an address that is not local.",
             &wish.security.allow_insecure);
  flags.String("device", "DEVICE", "Where shuffles are to run: cpu, hip:N or auto, as for prepare.",
               &wish.device);
  flags.String("backend", "NAME", "Kernel backend of the engine, or AUTO.", &wish.backend);
  flags.String("activation", "NAME", "Activation of the experts.", &wish.activation);
  flags.String("architecture", "NAME", "GPU architecture of the engine.", &wish.architecture);
  flags.String("profile", "NAME", "Layout profile that the engine reads.", &wish.profile);
  flags.String("alignment-policy", "FILE", "Replaces the compiled-in table of alignment rules.",
               &wish.alignment_policy);
  wish.s3.AddTo(flags);
}

}  // namespace

int RunDoctor(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep doctor",
                 .summary = "Tries what a job will need: the device, the alignment policy, and, "
                            "where named, what a destination really does (conditional put, ranges, "
                            "large objects, listing), its speed and space, certificates, clock and "
                            "controller. One line each: ok, warn or fail, and what to do. Removes "
                            "what it wrote. Exits with 1 when something must be put right.",
                 .example = "  shardprep doctor --destination s3://prepared/probe --controller "
                            "127.0.0.1:7070"});
  DoctorFlags wish;
  Declare(flags, wish);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;
  if (const absl::Status named = CheckDeviceName(wish.device); !named.ok()) {
    return Fail(kCommand, named);
  }

  Report report;
  report.Add(CheckDevice(wish.device));
  const auto policy = Policy(wish);
  if (policy.ok()) {
    report.Add(
        CheckTarget(*policy, wish.backend, wish.activation, wish.architecture, wish.profile));
  } else {
    report.Add("alignment policy", policy.status(), "", "correct the file, or leave the flag out");
  }
  const TlsFiles& tls = wish.security.tls;
  if (!tls.certificate.empty() || !tls.key.empty() || !tls.ca.empty()) {
    report.Add(CheckCertificates(tls, absl::Now()));
  }
  if (!wish.controller.empty()) CheckController(wish, report);
  for (const std::string& source : wish.sources) CheckSource(context, wish, source, report);
  for (const std::string& uri : wish.destinations) CheckDestination(context, wish, uri, report);
  return report.Finish();
}

}  // namespace shardprep
