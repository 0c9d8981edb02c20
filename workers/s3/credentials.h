// Where S3 credentials come from: the environment, or a shared credentials file that is read again
// when it changes, so that rotated and mounted secrets keep working in uploads that take hours.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace shardprep {

struct AwsCredentials {
  std::string access_key_id;
  std::string secret_access_key;
  std::string session_token;  // empty: none
};

// Thread safe.
class CredentialsProvider {
 public:
  virtual ~CredentialsProvider() = default;

  // The credentials to sign the next request with. FAILED_PRECONDITION saying where was looked for
  // them when there are none; no message ever holds a secret.
  virtual absl::StatusOr<AwsCredentials> Get() = 0;

  // Looks again now, whatever is cached: for a request that was answered with expired credentials.
  // True when they differ from `used`, so that another attempt makes sense.
  virtual bool Refresh(const AwsCredentials& used) = 0;
};

// What the provider looks at; filled by main from the environment (s3_options.h).
struct CredentialsSource {
  // AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN. Used when one of the first two is
  // set; a half of the pair is FAILED_PRECONDITION, so that it never hides behind the file.
  AwsCredentials environment;
  // AWS_SHARED_CREDENTIALS_FILE, default ~/.aws/credentials; empty: none.
  std::string file;
  // AWS_PROFILE, default "default": the section of the file.
  std::string profile = "default";
};

// Credentials of the environment when there are any, else those of the file. Get() compares the
// file's size, times and inode, following links (Kubernetes swaps one to rotate a secret), and
// reads it again when they differ. A file that cannot be used, as when it is caught while it is
// written or swapped, leaves the last good credentials in use until a later call finds better ones.
// Roles (web identity, container and instance metadata) are not asked.
std::unique_ptr<CredentialsProvider> MakeCredentialsProvider(const CredentialsSource& source);

// The section `profile` of a shared credentials file's text: `[section]`, `key = value`, comments
// after # or ; at the start of a line or after a space; keys in any case. Sections and keys that
// come twice are merged, the later value holds. A line that is indented deeper than the key before
// it belongs to that key's value. INVALID_ARGUMENT naming the line for text that is no such file;
// NOT_FOUND for a missing section or key.
absl::StatusOr<AwsCredentials> ParseCredentialsFile(const std::string& text,
                                                    const std::string& profile);

}  // namespace shardprep
