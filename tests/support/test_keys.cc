#include "tests/support/test_keys.h"

#include <openssl/evp.h>
#include <openssl/pem.h>

#include <cstdio>
#include <memory>

#include "kernels/status_macros.h"

namespace shardprep {
namespace {

using File = std::unique_ptr<std::FILE, decltype(&std::fclose)>;

File OpenForWriting(const std::string& path) {
  File file(std::fopen(path.c_str(), "wb"), &std::fclose);
  SP_CHECK(file != nullptr);
  return file;
}

}  // namespace

TestKeyPair::TestKeyPair(Kind kind) {
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> key(
      kind == Kind::kEcP256 ? EVP_EC_gen("P-256") : EVP_PKEY_Q_keygen(nullptr, nullptr, "ED25519"),
      &EVP_PKEY_free);
  SP_CHECK(key != nullptr);
  const bool locked = kind == Kind::kEd25519WithPassphrase;
  char passphrase[] = "correct horse";
  const File secret = OpenForWriting(private_path());
  SP_CHECK(PEM_write_PKCS8PrivateKey(secret.get(), key.get(), locked ? EVP_aes_256_cbc() : nullptr,
                                     locked ? passphrase : nullptr,
                                     locked ? static_cast<int>(sizeof(passphrase)) - 1 : 0, nullptr,
                                     nullptr) == 1);
  const File open = OpenForWriting(public_path());
  SP_CHECK(PEM_write_PUBKEY(open.get(), key.get()) == 1);
}

}  // namespace shardprep
