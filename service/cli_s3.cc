#include "service/cli_s3.h"

#include <algorithm>

#include "kernels/status_macros.h"
#include "workers/open_store.h"
#include "workers/s3/s3_client.h"

namespace shardprep {

void S3CliFlags::AddTo(FlagSet& flags) {
  flags.String("s3-endpoint", "URL",
               "S3 endpoint, http(s)://host[:port]. Default: AWS_ENDPOINT_URL_S3, "
               "AWS_ENDPOINT_URL, else that of AWS.",
               &given_.endpoint);
  flags.String("s3-region", "NAME", "S3 region. Default: AWS_REGION, AWS_DEFAULT_REGION.",
               &given_.region);
  flags.String("s3-addressing", "HOW",
               "Where the bucket stands in S3 requests: path, or virtual (in the host name).",
               &given_.addressing);
  flags.String(
      "s3-ca-bundle", "FILE",
      "PEM certificates that sign the S3 endpoint's. Default: AWS_CA_BUNDLE, the system's.",
      &given_.ca_bundle);
  flags.String("s3-payload", "HOW",
               "signed, the default, or unsigned: whether S3 payloads are hashed before they are "
               "sent. unsigned over TLS only.",
               &given_.payload);
}

absl::StatusOr<std::shared_ptr<S3Connection>> S3CliFlags::Connect(
    const CliContext& context, const std::vector<std::string>& uris) const {
  if (std::none_of(uris.begin(), uris.end(), IsS3Uri)) return std::shared_ptr<S3Connection>();
  SP_ASSIGN_OR_RETURN(const S3Options options, MakeS3Options(given_, context.environment));
  return ConnectS3(options);
}

}  // namespace shardprep
