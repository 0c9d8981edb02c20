// `shardprep verify`: reads an artefact back and proves it.
#include <cstdio>
#include <memory>
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
#include "workers/open_store.h"
#include "workers/resources.h"
#include "workers/verify.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "verify";

struct VerifyFlags {
  std::string destination;
  std::string source;
  std::string alignment_policy;
  std::string allow_source_root;
  std::vector<std::string> trust;
  S3CliFlags s3;
  int64_t threads = DefaultThreads();
  int64_t memory_budget_bytes = int64_t{256} << 20;
};

absl::StatusOr<VerifyReport> Verify(const CliContext& context, const VerifyFlags& flags) {
  SP_ASSIGN_OR_RETURN(const std::string uri,
                      NormalizeUri(flags.destination, context.working_directory));
  SP_ASSIGN_OR_RETURN(const auto s3, flags.s3.Connect(context, {uri, flags.source}));
  SP_ASSIGN_OR_RETURN(const auto artifact, OpenStore(uri, {.s3 = s3}));
  VerifyOptions options;
  options.s3 = s3;
  options.threads = static_cast<int>(flags.threads);
  options.memory_budget_bytes = flags.memory_budget_bytes;
  SP_ASSIGN_OR_RETURN(options.trusted, TrustedKeys::Read(flags.trust));
  SP_ASSIGN_OR_RETURN(
      options.allowed_source_roots,
      DirectoryList(flags.allow_source_root, "allow-source-root", context.working_directory));
  if (!flags.alignment_policy.empty()) {
    SP_ASSIGN_OR_RETURN(options.alignment_policy_json, ReadPolicyText(flags.alignment_policy));
  }
  std::unique_ptr<ObjectStore> source;
  if (!flags.source.empty()) {
    SP_ASSIGN_OR_RETURN(const std::string source_uri,
                        NormalizeUri(flags.source, context.working_directory));
    SP_ASSIGN_OR_RETURN(
        source,
        OpenStore(source_uri,
                  {.create = false, .allowed_roots = options.allowed_source_roots, .s3 = s3}));
    options.source = source.get();
  }
  Console console(kCommand, /*capture_logs=*/false);
  options.progress = [&console](int64_t done_bytes, int64_t total_bytes) {
    console.Progress({.done_bytes = done_bytes, .total_bytes = total_bytes, .note = ""});
  };
  auto report = VerifyArtifact(*artifact, options);
  console.EndProgress();
  return report;
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

std::string NextStep(const absl::Status& status, const VerifyFlags& flags) {
  if (absl::IsDataLoss(status)) {
    return absl::StrCat("Do not load this artefact. Delete ", flags.destination,
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
  VerifyFlags wish;
  flags.Argument("DESTINATION", "Place of the artefact: a directory, file:// or s3:// URI.",
                 &wish.destination);
  flags.String("source", "URI", "Checkpoint that it was made from.", &wish.source);
  flags.Int("threads", "N", "Threads that check.", 1, 1024, &wish.threads);
  flags.Size("memory-budget", "Memory for all buffers.", &wish.memory_budget_bytes);
  flags.String("alignment-policy", "FILE",
               "The policy that the job was given, where it was given one. For --source.",
               &wish.alignment_policy);
  flags.String("allow-source-root", "DIR,...",
               "Directories that symbolic links of the source may lead into.",
               &wish.allow_source_root);
  flags.Strings("trust", "KEY",
                "PEM file of an Ed25519 public key. The manifest must be signed by one of them.",
                &wish.trust);
  wish.s3.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto report = Verify(context, wish);
  if (!report.ok()) return Fail(kCommand, report.status(), NextStep(report.status(), wish));
  PrintReport(*report, !wish.source.empty());
  return kExitOk;
}

}  // namespace shardprep
