// `shardprep sign`: verifies an artefact that is there, and signs its manifest.
#include <cstdio>
#include <string>

#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_artifact.h"
#include "service/plan_report.h"
#include "workers/artifact.h"
#include "workers/signature.h"
#include "workers/verify.h"

namespace shardprep {
namespace {

constexpr char kCommand[] = "sign";

// The id of the key that signed.
absl::StatusOr<std::string> Sign(const CliContext& context, const ArtifactFlags& flags,
                                 const std::string& key_file, VerifyReport& report) {
  SP_ASSIGN_OR_RETURN(const auto key, SigningKey::Read(key_file));
  SP_ASSIGN_OR_RETURN(const VerifiedArtifact verified,
                      VerifyWithProgress(context, kCommand, flags, {}));
  SP_RETURN_IF_ERROR(SignArtifact(*verified.store, verified.report.manifest_sha256, *key));
  report = verified.report;
  return key->key_id();
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
  ArtifactFlags wish;
  std::string key;
  wish.AddTo(flags);
  flags.String("sign-key", "FILE", "PEM file of the Ed25519 private key.", &key,
               FlagSet::Presence::kRequired);
  if (const auto exit_code = ParseOrExit(flags, kCommand, arguments)) return *exit_code;

  VerifyReport report;
  const auto key_id = Sign(context, wish, key, report);
  if (!key_id.ok()) return Fail(kCommand, key_id.status(), "Nothing was signed.");
  std::printf("verified%s and signed\n", wish.source.empty() ? "" : " against its source");
  std::fputs(AlignedRows({{"key id", *key_id},
                          {"manifest", report.manifest_sha256},
                          {"content id", report.content_id}})
                 .c_str(),
             stdout);
  return kExitOk;
}

}  // namespace shardprep
