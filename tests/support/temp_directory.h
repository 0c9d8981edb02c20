// A new directory for one test, removed with all that lies in it.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "gtest/gtest.h"
#include "kernels/status_macros.h"

namespace shardprep {

class TempDirectory {
 public:
  TempDirectory() : path_(testing::TempDir() + "shardprep-XXXXXX") {
    SP_CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~TempDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;

  // Absolute, without a trailing slash.
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

}  // namespace shardprep
