// Who made an artefact: a detached Ed25519 signature of manifest.json.
//
// The manifest has a digest of every other file, so a signature of its bytes covers the artefact.
// The signature lies beside it as `manifest.json.sig` and is written before it, so that a reader
// that sees the manifest of a signing job sees the signature. It is text of two lines:
//
//   shardprep-signature 1
//   ed25519 {key id} {signature}
//
// The key id is the SHA-256, in lower-case hexadecimal, of the public key in DER
// (SubjectPublicKeyInfo). The signature is RFC 8032's pure Ed25519 over the bytes of manifest.json,
// 64 bytes in base64. Equal keys and manifests give equal bytes.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "workers/object_store.h"

namespace shardprep {

// A private key. Immutable and thread safe. Its bytes appear in no message.
class SigningKey {
 public:
  // Reads a PEM file without passphrase (PKCS #8). FAILED_PRECONDITION when it cannot be read;
  // INVALID_ARGUMENT, naming the file, when it holds no Ed25519 private key.
  static absl::StatusOr<std::shared_ptr<const SigningKey>> Read(const std::string& path);
  virtual ~SigningKey() = default;

  virtual const std::string& key_id() const = 0;
  // The text of manifest.json.sig for these bytes of manifest.json. INTERNAL when OpenSSL fails.
  virtual absl::StatusOr<std::string> Sign(const std::string& manifest_text) const = 0;
};

// Public keys, of which any may have signed. Immutable and thread safe.
class TrustedKeys {
 public:
  // Reads PEM files of public keys. Errors as SigningKey::Read(); a private key is refused too:
  // it has no business where artefacts are only read.
  static absl::StatusOr<TrustedKeys> Read(const std::vector<std::string>& paths);

  // No key: nothing is checked.
  bool empty() const { return keys_.empty(); }

  // Checks a signature's text. DATA_LOSS when it is malformed or cut off, or is not the signature
  // of these bytes; PERMISSION_DENIED, naming the key ids, when another key made it.
  absl::Status Check(const std::string& signature_text, const std::string& manifest_text) const;

  // Reads the signature beside a manifest, and checks it. FAILED_PRECONDITION when there is none;
  // else errors of Check() and of the store.
  absl::Status CheckStored(ObjectStore& store, const std::string& manifest_text) const;

 private:
  // Public keys as 32 raw bytes, by key id.
  std::map<std::string, std::string> keys_;
};

// The key id in a signature's text. DATA_LOSS when the text is malformed.
absl::StatusOr<std::string> SignatureKeyId(const std::string& signature_text);

}  // namespace shardprep
