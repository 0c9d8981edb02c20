// Certificates made afresh in a temporary directory that goes with the object: an authority,
// ca.pem, and leaves of its making. There is one from the start: leaf.pem and leaf.key, for
// localhost and 127.0.0.1.
#pragma once

#include <memory>
#include <string>

#include "tests/support/temp_dir.h"
#include "workers/grpc_channel.h"

struct evp_pkey_st;
struct x509_st;

namespace shardprep {

struct TestLeaf {
  std::string common_name = "localhost";
  std::string alternative_names = "DNS:localhost,IP:127.0.0.1";  // as OpenSSL writes them; or none
  bool expired = false;
};

class TestCertificates {
 public:
  TestCertificates();

  std::string path(const std::string& name) const { return directory_ / name; }

  // Writes {name}.pem and {name}.key, over older ones each by a rename, as rotation does.
  void Issue(const std::string& name, const TestLeaf& leaf);

  // What a process uses that has this leaf and trusts this authority.
  ConnectionSecurity Security(const std::string& name = "leaf") const;

 private:
  TempDir directory_;
  std::shared_ptr<evp_pkey_st> ca_key_;
  std::shared_ptr<x509_st> ca_;
};

}  // namespace shardprep
