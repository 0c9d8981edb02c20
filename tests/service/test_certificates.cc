#include "tests/service/test_certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
#include <functional>
#include <memory>

#include "kernels/status_macros.h"

namespace shardprep {
namespace {

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;
using Certificate = std::unique_ptr<X509, decltype(&X509_free)>;

Key MakeKey() {
  Key key(EVP_EC_gen("P-256"), &EVP_PKEY_free);
  SP_CHECK(key != nullptr);
  return key;
}

void AddExtension(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
  SP_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

// A certificate for `key`, signed by the issuer; self-signed when there is none.
Certificate MakeCertificate(const TestLeaf& leaf, EVP_PKEY* key, X509* issuer,
                            EVP_PKEY* issuer_key) {
  Certificate certificate(X509_new(), &X509_free);
  X509* const x = certificate.get();
  X509_set_version(x, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(x), issuer == nullptr ? 1 : 2);
  X509_gmtime_adj(X509_getm_notBefore(x), -7200);
  X509_gmtime_adj(X509_getm_notAfter(x), leaf.expired ? -3600 : 86400);
  X509_set_pubkey(x, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(leaf.common_name.c_str()), -1,
                             -1, 0);
  X509* const signer = issuer == nullptr ? x : issuer;
  X509_set_issuer_name(x, X509_get_subject_name(signer));
  if (issuer == nullptr) {
    AddExtension(x, signer, NID_basic_constraints, "critical,CA:TRUE");
    AddExtension(x, signer, NID_key_usage, "critical,keyCertSign");
  } else if (!leaf.alternative_names.empty()) {
    AddExtension(x, signer, NID_subject_alt_name, leaf.alternative_names.c_str());
  }
  SP_CHECK(X509_sign(x, issuer_key, EVP_sha256()) > 0);
  return certificate;
}

// Under another name first, so that a reader sees the old file or the new one.
void Replace(const std::string& path, const std::function<int(std::FILE*)>& write) {
  const std::string temporary = path + ".new";
  std::FILE* file = std::fopen(temporary.c_str(), "w");
  SP_CHECK(file != nullptr && write(file) == 1);
  SP_CHECK(std::fclose(file) == 0 && std::rename(temporary.c_str(), path.c_str()) == 0);
}

}  // namespace

TestCertificates::TestCertificates() : ca_key_(MakeKey()) {
  const TestLeaf authority = {.common_name = "test authority", .alternative_names = ""};
  ca_ = MakeCertificate(authority, ca_key_.get(), nullptr, ca_key_.get());
  Replace(path("ca.pem"), [this](std::FILE* file) { return PEM_write_X509(file, ca_.get()); });
  Issue("leaf", {});
}

void TestCertificates::Issue(const std::string& name, const TestLeaf& leaf) {
  const Key key = MakeKey();
  const Certificate certificate = MakeCertificate(leaf, key.get(), ca_.get(), ca_key_.get());
  Replace(path(name + ".key"), [&key](std::FILE* file) {
    return PEM_write_PrivateKey(file, key.get(), nullptr, nullptr, 0, nullptr, nullptr);
  });
  Replace(path(name + ".pem"),
          [&certificate](std::FILE* file) { return PEM_write_X509(file, certificate.get()); });
}

ConnectionSecurity TestCertificates::Security(const std::string& name) const {
  return {.tls = {.certificate = path(name + ".pem"),
                  .key = path(name + ".key"),
                  .ca = path("ca.pem")}};
}

}  // namespace shardprep
