// `shardprep sign`: verifies an artefact that is there, and signs its manifest.
#include <cstdio>
#include <memory>
#include <string>

#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_console.h"
#include "service/cli_s3.h"
#include "service/plan_report.h"
#include "service/progress_line.h"
#include "workers/artifact.h"
#include "workers/open_store.h"
#include "workers/resources.h"
#include "workers/signature.h"
#include "workers/verify.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "sign";

struct SignFlags {
  std::string artifact;
  std::string key;
  std::string source;
  S3CliFlags s3;
};

struct Signed {
  std::string key_id;
  VerifyReport report;
};

absl::StatusOr<Signed> Sign(const CliContext& context, const SignFlags& flags) {
  SP_ASSIGN_OR_RETURN(const auto key, SigningKey::Read(flags.key));
  SP_ASSIGN_OR_RETURN(const std::string uri,
                      NormalizeUri(flags.artifact, context.working_directory));
  SP_ASSIGN_OR_RETURN(const auto s3, flags.s3.Connect(context, {uri, flags.source}));
  SP_ASSIGN_OR_RETURN(const auto artifact, OpenStore(uri, {.s3 = s3}));
  VerifyOptions options;
  options.s3 = s3;
  options.threads = DefaultThreads();
  std::unique_ptr<ObjectStore> source;
  if (!flags.source.empty()) {
    SP_ASSIGN_OR_RETURN(const std::string source_uri,
                        NormalizeUri(flags.source, context.working_directory));
    SP_ASSIGN_OR_RETURN(source, OpenStore(source_uri, {.s3 = s3}));
    options.source = source.get();
  }
  Console console(kCommand, /*capture_logs=*/false);
  options.progress = [&console](int64_t done_bytes, int64_t total_bytes) {
    console.Progress({.done_bytes = done_bytes, .total_bytes = total_bytes, .note = ""});
  };
  auto report = VerifyArtifact(*artifact, options);
  console.EndProgress();
  SP_RETURN_IF_ERROR(report.status());
  SP_RETURN_IF_ERROR(SignArtifact(*artifact, report->manifest_sha256, *key));
  return Signed{.key_id = key->key_id(), .report = *std::move(report)};
}

}  // namespace

int RunSign(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep sign",
                 .summary = "Verifies an artefact as `shardprep verify` does and then signs its "
                            "manifest, in place of any signature that it has: for artefacts that "
                            "were prepared without a key, or with one that is withdrawn. With "
                            "--source the signature also says that the bytes are the checkpoint's.",
                 .example = "  shardprep sign prepared --sign-key key.pem --source "
                            "DeepSeek-V4-Pro"});
  SignFlags wish;
  flags.Argument("DESTINATION", "Place of the artefact: a directory, file:// or s3:// URI.",
                 &wish.artifact);
  flags.String("sign-key", "FILE", "PEM file of the Ed25519 private key.", &wish.key,
               FlagSet::Presence::kRequired);
  flags.String("source", "URI", "Checkpoint that it was made from.", &wish.source);
  wish.s3.AddTo(flags);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  const auto done = Sign(context, wish);
  if (!done.ok()) return Fail(kCommand, done.status(), "Nothing was signed.");
  std::printf("verified%s and signed\n", wish.source.empty() ? "" : " against its source");
  std::fputs(AlignedRows({{"key id", done->key_id},
                          {"manifest", done->report.manifest_sha256},
                          {"content id", done->report.content_id}})
                 .c_str(),
             stdout);
  return kExitOk;
}

}  // namespace shardprep
