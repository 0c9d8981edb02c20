// A certificate authority and one certificate for localhost and 127.0.0.1, made afresh in a
// temporary directory that goes with the object: ca.pem, leaf.pem, leaf.key.
#pragma once

#include <string>

#include "tests/support/temp_dir.h"

namespace shardprep {

class TestCertificates {
 public:
  TestCertificates();

  std::string path(const std::string& name) const { return directory_ / name; }

 private:
  TempDir directory_;
};

}  // namespace shardprep
