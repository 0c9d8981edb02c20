#include "workers/signature.h"

#include <openssl/bio.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cerrno>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"
#include "workers/digest.h"
#include "workers/object_names.h"

namespace shardprep {
namespace {

constexpr char kFirstLine[] = "shardprep-signature 1";
constexpr char kAlgorithm[] = "ed25519";
constexpr size_t kSignatureBytes = 64;
constexpr size_t kPublicKeyBytes = 32;
constexpr size_t kMaxPemBytes = 64 << 10;
constexpr int64_t kMaxSignatureTextBytes = 4096;

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Bio = std::unique_ptr<BIO, decltype(&BIO_free)>;
using Context = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

std::string SignatureKey() { return ObjectKey(ManifestSignature{}); }

const unsigned char* Bytes(const std::string& text) {
  return reinterpret_cast<const unsigned char*>(text.data());
}

// Answers a request for a passphrase: nobody is there to be asked.
int NoPassphrase(char* /*buffer*/, int /*size*/, int /*for_writing*/, void* /*user*/) { return -1; }

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::FailedPreconditionError(absl::StrCat(
        "key file ", path, ": cannot be opened: ", std::generic_category().message(errno)));
  }
  std::string text(kMaxPemBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) {
    return absl::FailedPreconditionError(absl::StrCat("key file ", path, ": cannot be read"));
  }
  text.resize(static_cast<size_t>(file.gcount()));
  if (text.size() > kMaxPemBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("key file ", path, ": more than ", kMaxPemBytes, " bytes"));
  }
  return text;
}

absl::Status CheckType(const EVP_PKEY* key, const std::string& path, const char* want) {
  if (key == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("key file ", path, ": no PEM of ", want));
  }
  if (EVP_PKEY_get_id(key) == EVP_PKEY_ED25519) return absl::OkStatus();
  const char* const found = EVP_PKEY_get0_type_name(key);
  return absl::InvalidArgumentError(absl::StrCat("key file ", path, ": a key for ",
                                                 found == nullptr ? "an unknown use" : found,
                                                 ", want ", want));
}

std::string KeyIdOf(const EVP_PKEY* key) {
  unsigned char* der = nullptr;
  const int size = i2d_PUBKEY(key, &der);
  SP_CHECK(size > 0);
  std::string id = Sha256Hex({der, static_cast<size_t>(size)});
  OPENSSL_free(der);
  return id;
}

struct ParsedSignature {
  std::string key_id;
  std::string bytes;
};

absl::StatusOr<ParsedSignature> ParseSignature(const std::string& text) {
  const auto fail = [](const std::string& why) {
    return absl::DataLossError(absl::StrCat(SignatureKey(), ": ", why));
  };
  const std::vector<absl::string_view> lines = absl::StrSplit(text, '\n');
  if (lines.empty() || lines[0] != kFirstLine) {
    return fail(absl::StrCat("does not begin with the line '", kFirstLine, "'"));
  }
  if (lines.size() != 3 || !lines[2].empty()) return fail("cut off, want two whole lines");
  const std::vector<absl::string_view> words = absl::StrSplit(lines[1], ' ');
  if (words.size() != 3 || words[0] != kAlgorithm || !IsFingerprint(std::string(words[1]))) {
    return fail("want 'ed25519', a key id of 64 hexadecimal digits and a signature");
  }
  ParsedSignature parsed{.key_id = std::string(words[1]), .bytes = ""};
  // Base64 has several spellings of some bytes; one is ours.
  if (!absl::Base64Unescape(words[2], &parsed.bytes) || parsed.bytes.size() != kSignatureBytes ||
      absl::Base64Escape(parsed.bytes) != words[2]) {
    return fail(absl::StrCat("the signature is not ", kSignatureBytes, " bytes in base64"));
  }
  return parsed;
}

bool Verifies(const std::string& public_key, const std::string& signature,
              const std::string& bytes) {
  const Key key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, Bytes(public_key), public_key.size()),
      &EVP_PKEY_free);
  const Context context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  SP_CHECK(key != nullptr && context != nullptr);
  return EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) == 1 &&
         EVP_DigestVerify(context.get(), Bytes(signature), signature.size(), Bytes(bytes),
                          bytes.size()) == 1;
}

class OpenSslSigningKey : public SigningKey {
 public:
  explicit OpenSslSigningKey(Key key) : key_(std::move(key)), key_id_(KeyIdOf(key_.get())) {}

  const std::string& key_id() const override { return key_id_; }

  absl::StatusOr<std::string> Sign(const std::string& manifest_text) const override {
    const Context context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
    std::string signature(kSignatureBytes, '\0');
    size_t size = signature.size();
    if (context == nullptr ||
        EVP_DigestSignInit(context.get(), nullptr, nullptr, nullptr, key_.get()) != 1 ||
        EVP_DigestSign(context.get(), reinterpret_cast<unsigned char*>(signature.data()), &size,
                       Bytes(manifest_text), manifest_text.size()) != 1 ||
        size != kSignatureBytes) {
      return absl::InternalError(absl::StrCat("signing with key ", key_id_, " failed"));
    }
    return absl::StrCat(kFirstLine, "\n", kAlgorithm, " ", key_id_, " ",
                        absl::Base64Escape(signature), "\n");
  }

 private:
  const Key key_;
  const std::string key_id_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<const SigningKey>> SigningKey::Read(const std::string& path) {
  SP_ASSIGN_OR_RETURN(const std::string pem, ReadPem(path));
  const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
  SP_CHECK(bio != nullptr);
  Key key(PEM_read_bio_PrivateKey(bio.get(), nullptr, &NoPassphrase, nullptr), &EVP_PKEY_free);
  SP_RETURN_IF_ERROR(
      CheckType(key.get(), path, "an Ed25519 private key without passphrase (PKCS #8)"));
  return {std::make_shared<OpenSslSigningKey>(std::move(key))};
}

absl::StatusOr<TrustedKeys> TrustedKeys::Read(const std::vector<std::string>& paths) {
  TrustedKeys trusted;
  for (const std::string& path : paths) {
    SP_ASSIGN_OR_RETURN(const std::string pem, ReadPem(path));
    const Bio bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())), &BIO_free);
    SP_CHECK(bio != nullptr);
    const Key key(PEM_read_bio_PUBKEY(bio.get(), nullptr, &NoPassphrase, nullptr), &EVP_PKEY_free);
    SP_RETURN_IF_ERROR(CheckType(key.get(), path, "an Ed25519 public key"));
    std::string raw(kPublicKeyBytes, '\0');
    size_t size = raw.size();
    SP_CHECK(EVP_PKEY_get_raw_public_key(key.get(), reinterpret_cast<unsigned char*>(raw.data()),
                                         &size) == 1 &&
             size == kPublicKeyBytes);
    trusted.keys_[KeyIdOf(key.get())] = raw;
  }
  return trusted;
}

absl::Status TrustedKeys::Check(const std::string& signature_text,
                                const std::string& manifest_text) const {
  SP_ASSIGN_OR_RETURN(const ParsedSignature signature, ParseSignature(signature_text));
  const auto key = keys_.find(signature.key_id);
  if (key == keys_.end()) {
    std::vector<std::string> ids;
    ids.reserve(keys_.size());
    for (const auto& [id, raw] : keys_) ids.push_back(id);
    return absl::PermissionDeniedError(absl::StrCat(SignatureKey(), ": made by key ",
                                                    signature.key_id, ", trusted is ",
                                                    absl::StrJoin(ids, ", ")));
  }
  if (Verifies(key->second, signature.bytes, manifest_text)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(SignatureKey(), ": is not key ", signature.key_id,
                                          "'s signature of this ", ObjectKey(ManifestName{}),
                                          " (SHA-256 ", Sha256Hex(manifest_text),
                                          "): one of the two was changed"));
}

absl::Status TrustedKeys::CheckStored(ObjectStore& store, const std::string& manifest_text) const {
  const auto text = store.Get(SignatureKey(), kMaxSignatureTextBytes);
  if (absl::IsNotFound(text.status())) {
    return absl::FailedPreconditionError(
        absl::StrCat(SignatureKey(), ": missing: the artefact at ", store.uri(), " is not signed"));
  }
  if (absl::IsResourceExhausted(text.status())) {
    return absl::DataLossError(absl::StrCat(SignatureKey(), ": more than ", kMaxSignatureTextBytes,
                                            " bytes, so no signature of ours"));
  }
  SP_RETURN_IF_ERROR(text.status());
  return Check(*text, manifest_text);
}

absl::StatusOr<std::string> SignatureKeyId(const std::string& signature_text) {
  SP_ASSIGN_OR_RETURN(const ParsedSignature signature, ParseSignature(signature_text));
  return signature.key_id;
}

}  // namespace shardprep
