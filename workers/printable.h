// Text from outside as messages show it.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace shardprep {

// `text` fit for a terminal, a log and a protobuf string: line feeds and valid UTF-8 stay, except
// control characters (C0, DEL, C1) and bytes that are no UTF-8, which become \xNN, one for each
// byte. Text that is printable already stays what it is. Names that stand inside a message have
// their own bound and escapes (PrintableName() in workers/safetensors.h).
std::string Printable(absl::string_view text);

// Whether a protobuf string can hold the text.
bool IsUtf8(absl::string_view text);

}  // namespace shardprep
