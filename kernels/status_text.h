// Saying more in a status. What it carries for programs, its code and payloads (ErrorInfo among
// them), stays with it.
#pragma once

#include "absl/status/status.h"
#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace shardprep {

// `status`, which is not OK, with another message.
inline absl::Status WithMessage(const absl::Status& status, absl::string_view message) {
  absl::Status result(status.code(), message);
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { result.SetPayload(url, payload); });
  return result;
}

// "<prefix>: <message>"; OK stays OK.
inline absl::Status Prefixed(absl::string_view prefix, const absl::Status& status) {
  if (status.ok()) return status;
  return WithMessage(status, absl::StrCat(prefix, ": ", status.message()));
}

}  // namespace shardprep
