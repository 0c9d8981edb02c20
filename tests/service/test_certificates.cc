#include "tests/service/test_certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>

#include <cstdio>
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
Certificate MakeCertificate(const char* name, EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key) {
  Certificate certificate(X509_new(), &X509_free);
  X509* const x = certificate.get();
  X509_set_version(x, 2);
  ASN1_INTEGER_set(X509_get_serialNumber(x), issuer == nullptr ? 1 : 2);
  X509_gmtime_adj(X509_getm_notBefore(x), -3600);
  X509_gmtime_adj(X509_getm_notAfter(x), 86400);
  X509_set_pubkey(x, key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(x), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(name), -1, -1, 0);
  X509* const signer = issuer == nullptr ? x : issuer;
  X509_set_issuer_name(x, X509_get_subject_name(signer));
  if (issuer == nullptr) {
    AddExtension(x, signer, NID_basic_constraints, "critical,CA:TRUE");
    AddExtension(x, signer, NID_key_usage, "critical,keyCertSign");
  } else {
    AddExtension(x, signer, NID_subject_alt_name, "DNS:localhost,IP:127.0.0.1");
  }
  SP_CHECK(X509_sign(x, issuer_key, EVP_sha256()) > 0);
  return certificate;
}

void WriteCertificate(const std::string& path, X509* certificate) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  SP_CHECK(file != nullptr && PEM_write_X509(file, certificate) == 1);
  std::fclose(file);
}

}  // namespace

TestCertificates::TestCertificates() {
  const Key ca_key = MakeKey();
  const Key leaf_key = MakeKey();
  const Certificate ca = MakeCertificate("test authority", ca_key.get(), nullptr, ca_key.get());
  const Certificate leaf = MakeCertificate("localhost", leaf_key.get(), ca.get(), ca_key.get());
  WriteCertificate(path("ca.pem"), ca.get());
  WriteCertificate(path("leaf.pem"), leaf.get());
  std::FILE* file = std::fopen(path("leaf.key").c_str(), "w");
  SP_CHECK(file != nullptr &&
           PEM_write_PrivateKey(file, leaf_key.get(), nullptr, nullptr, 0, nullptr, nullptr) == 1);
  std::fclose(file);
}

}  // namespace shardprep
