// Key files made afresh, in PEM.
#pragma once

#include <string>

#include "tests/support/temp_dir.h"

namespace shardprep {

// A pair in a temporary directory that goes with the object: private.pem and public.pem.
class TestKeyPair {
 public:
  enum class Kind { kEd25519, kEd25519WithPassphrase, kEcP256 };

  explicit TestKeyPair(Kind kind = Kind::kEd25519);

  std::string private_path() const { return directory_ / "private.pem"; }
  std::string public_path() const { return directory_ / "public.pem"; }

 private:
  TempDir directory_;
};

}  // namespace shardprep
