// `shardprep verify`: reads an artefact back and proves it.
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_artifact.h"
#include "service/plan_report.h"
#include "workers/byte_size.h"
#include "workers/signature.h"
#include "workers/verify.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "verify";

absl::StatusOr<VerifyReport> Verify(const CliContext& context, const ArtifactFlags& flags,
                                    const std::vector<std::string>& trust) {
  VerifyOptions options;
  SP_ASSIGN_OR_RETURN(options.trusted, TrustedKeys::Read(trust));
  SP_ASSIGN_OR_RETURN(VerifiedArtifact verified,
                      VerifyWithProgress(context, kCommand, flags, std::move(options)));
  return std::move(verified.report);
}

void PrintReport(const VerifyReport& report, bool with_source) {
  std::printf("verified: every byte is what the manifest declares%s\n",
              with_source ? ", and what the source holds" : "");
  const auto size = [](int64_t bytes) { return absl::StrCat(FormatThousands(bytes), " B"); };
  std::vector<std::vector<std::string>> table = {
      {"files", FormatThousands(report.files)},
      {"tensors", FormatThousands(report.tensors)},
      {"bytes of files", size(report.bytes)},
      {"bytes from the source, by checksum", size(report.native_bytes)},
      {"bytes of padding and fill", size(report.pad_bytes)}};
  if (with_source) {
    table.push_back({"bytes compared with the source", size(report.source_bytes_compared)});
  }
  std::fputs(AlignedTable(table, 1).c_str(), stdout);
  std::fputs(
      AlignedRows({{"fingerprint", report.layout_fingerprint}, {"content id", report.content_id}})
          .c_str(),
      stdout);
}

std::string NextStep(const absl::Status& status, const ArtifactFlags& flags) {
  if (absl::IsDataLoss(status)) {
    return absl::StrCat("Do not load this artefact. Delete ", flags.artifact,
                        " and prepare it again.");
  }
  if (absl::IsResourceExhausted(status)) return "Give a larger --memory-budget.";
  return "";
}

}  // namespace

int RunVerify(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep verify",
                 .summary = "Reads a prepared artefact back, every byte of it: digests, the "
                            "checksums of the source bytes after undoing the shuffle, and every "
                            "byte of padding. With --source the bytes are compared with the "
                            "checkpoint itself. Exits with 1 at the first difference.",
                 .example = "  shardprep verify prepared --source DeepSeek-V4-Pro"});
  ArtifactFlags wish;
  std::vector<std::string> trust;
  wish.AddTo(flags);
  flags.Strings("trust", "KEY",
                "PEM file of an Ed25519 public key. The manifest must be signed by one of them.",
                &trust);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto report = Verify(context, wish, trust);
  if (!report.ok()) return Fail(kCommand, report.status(), NextStep(report.status(), wish));
  PrintReport(*report, !wish.source.empty());
  return kExitOk;
}

}  // namespace shardprep
