// `shardprep fetch`: the shards of some ranks, if they are what the caller expects.
#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_console.h"
#include "service/cli_s3.h"
#include "service/plan_report.h"
#include "service/progress_line.h"
#include "workers/byte_size.h"
#include "workers/fetch.h"
#include "workers/open_store.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "fetch";

// Sets options.into to the absolute path.
absl::StatusOr<FetchReport> Fetch(const CliContext& context, const std::string& uri,
                                  const std::string& into, const S3CliFlags& s3_flags,
                                  const std::vector<std::string>& trust, FetchOptions& options) {
  SP_ASSIGN_OR_RETURN(options.trusted, TrustedKeys::Read(trust));
  SP_ASSIGN_OR_RETURN(options.into, NormalizeUri(into, context.working_directory));
  if (IsS3Uri(options.into)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--into: ", options.into, ", want a directory: engines read local files"));
  }
  SP_ASSIGN_OR_RETURN(const std::string artifact, NormalizeUri(uri, context.working_directory));
  SP_ASSIGN_OR_RETURN(const auto s3, s3_flags.Connect(context, {artifact}));
  Console console(kCommand, /*capture_logs=*/false);
  options.progress = [&console](int64_t done_bytes, int64_t total_bytes) {
    console.Progress({.done_bytes = done_bytes, .total_bytes = total_bytes, .note = ""});
  };
  auto report = FetchRanks(artifact, OpenStoreOptions{.s3 = s3}, options);
  console.EndProgress();
  return report;
}

void PrintReport(const FetchReport& report, const std::string& into) {
  if (report.was_complete) {
    std::printf("%s was complete; every digest was checked again, nothing was downloaded\n",
                into.c_str());
  } else {
    std::printf("fetched into %s\n", into.c_str());
  }
  std::fputs(AlignedRows({{"files", FormatThousands(report.files)},
                          {"bytes", ExactSize(report.bytes)},
                          {"downloaded", ExactSize(report.bytes_downloaded)},
                          {"fingerprint", report.layout_fingerprint},
                          {"content id", report.content_id}})
                 .c_str(),
             stdout);
}

std::string NextStep(const absl::Status& status, const std::string& uri) {
  if (absl::IsUnavailable(status)) {
    return "Run the same command again: it resumes with what is there.";
  }
  if (absl::IsDataLoss(status)) {
    return absl::StrCat("Run the same command again; if it finds the same, delete ", uri,
                        " and prepare it again.");
  }
  return "";
}

}  // namespace

int RunFetch(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep fetch",
                 .summary =
                     "Downloads the files of some ranks of a prepared artefact, checks every "
                     "byte, and makes the directory appear when it is whole. Refuses an "
                     "artefact that is not what --expect says, since an engine cannot tell. "
                     "An interrupted fetch is resumed by the same command.",
                 .example = "  shardprep fetch /shared/prepared --rank 0-7 --into /local/prepared "
                            "\\\n    --expect backend=AITER_MXFP4_BF16,profile=aiter-separated,"
                            "width=384"});
  std::string uri;
  std::string into;
  int64_t parallel = 4;
  std::vector<std::string> trust;
  S3CliFlags s3_flags;
  FetchOptions options;
  flags.Argument("URI", "Place of the artefact: a directory, file:// or s3:// URI.", &uri);
  flags.Value(
      "rank", "RANKS", "Ranks to fetch: 3, or 0,1, or 0-7.",
      [&options](const std::string& text) {
        SP_ASSIGN_OR_RETURN(options.ranks, ParseRankList(text));
        return absl::OkStatus();
      },
      FlagSet::Presence::kRequired);
  flags.String("into", "DIR", "Directory to create.", &into, FlagSet::Presence::kRequired);
  flags.Value("expect", "KEY=VALUE,...",
              "What the artefact must be. Keys: backend, activation, arch, tp, ep, profile, width "
              "and hidden (both padded, of one rank), gate_mode, aiter (the version at hand), "
              "fingerprint, content. profile and width must be among them.",
              [&options](const std::string& text) {
                SP_ASSIGN_OR_RETURN(options.expect, ParseExpectations(text));
                return absl::OkStatus();
              });
  flags.Bool("no-expect", "Fetches without knowing profile and width.", &options.no_expect);
  flags.Strings("trust", "KEY",
                "PEM file of an Ed25519 public key. Fetches only what one of these keys signed.",
                &trust);
  s3_flags.AddTo(flags);
  flags.Int("parallel", "N", "Chunks of 16 MiB in flight.", 1, 256, &parallel);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  options.parallel = static_cast<int>(parallel);
  const auto report = Fetch(context, uri, into, s3_flags, trust, options);
  if (!report.ok()) return Fail(kCommand, report.status(), NextStep(report.status(), uri));
  PrintReport(*report, options.into);
  return kExitOk;
}

}  // namespace shardprep
