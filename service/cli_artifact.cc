#include "service/cli_artifact.h"

#include <utility>

#include "kernels/status_macros.h"
#include "service/cli_console.h"
#include "workers/open_store.h"

namespace shardprep {

void ArtifactFlags::AddTo(FlagSet& flags) {
  flags.Argument("DESTINATION", "Place of the artefact: a directory, file:// or s3:// URI.",
                 &artifact);
  flags.String("source", "URI", "Checkpoint that it was made from.", &source);
  flags.Int("threads", "N", "Threads that check.", 1, 1024, &threads);
  flags.Size("memory-budget", "Memory for all buffers.", &memory_budget_bytes);
  flags.String("alignment-policy", "FILE",
               "The policy that the job was given, where it was given one. For --source.",
               &alignment_policy);
  flags.String("allow-source-root", "DIR,...",
               "Directories that symbolic links of the source may lead into.", &allow_source_root);
  s3.AddTo(flags);
}

absl::StatusOr<VerifiedArtifact> VerifyWithProgress(const CliContext& context, const char* command,
                                                    const ArtifactFlags& flags,
                                                    VerifyOptions options) {
  VerifiedArtifact verified;
  SP_ASSIGN_OR_RETURN(const std::string uri,
                      NormalizeUri(flags.artifact, context.working_directory));
  SP_ASSIGN_OR_RETURN(options.s3, flags.s3.Connect(context, {uri, flags.source}));
  SP_ASSIGN_OR_RETURN(verified.store, OpenStore(uri, {.s3 = options.s3}));
  options.threads = static_cast<int>(flags.threads);
  options.memory_budget_bytes = flags.memory_budget_bytes;
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
    SP_ASSIGN_OR_RETURN(source,
                        OpenStore(source_uri, {.create = false,
                                               .allowed_roots = options.allowed_source_roots,
                                               .s3 = options.s3}));
    options.source = source.get();
  }
  Console console(command, /*capture_logs=*/false);
  options.progress = [&console](int64_t done_bytes, int64_t total_bytes) {
    console.Progress({.done_bytes = done_bytes, .total_bytes = total_bytes, .note = ""});
  };
  auto report = VerifyArtifact(*verified.store, options);
  console.EndProgress();
  SP_RETURN_IF_ERROR(report.status());
  verified.report = *std::move(report);
  return verified;
}

}  // namespace shardprep
