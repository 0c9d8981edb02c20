// A directory for one process's Unix socket, which does not outlive the process by long: however
// it ends, the next process of the same user removes it.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace shardprep {

class SocketDirectory {
 public:
  // A new directory with mode 0700 in `parent`, after removing those there that processes of this
  // user left behind. FAILED_PRECONDITION when none can be made.
  static absl::StatusOr<std::unique_ptr<SocketDirectory>> Make(const std::string& parent);
  // Removes the directory with the socket in it.
  virtual ~SocketDirectory() = default;

  // Where the socket goes. Short, since socket addresses hold 107 bytes.
  virtual const std::string& socket_path() const = 0;
};

}  // namespace shardprep
