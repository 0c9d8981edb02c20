#include "workers/object_names.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/status_macros.h"

namespace shardprep {
namespace {

constexpr int64_t kMaxIdBytes = 128;

bool IsId(absl::string_view text) {
  return !text.empty() && static_cast<int64_t>(text.size()) <= kMaxIdBytes &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
         });
}

std::string Number(int64_t value) {
  SP_CHECK(value >= 0 && value <= kMaxNameNumber);
  return absl::StrCat(value);
}

// A number exactly as Number() writes it.
std::optional<int64_t> ParseNumber(absl::string_view text) {
  if (text.empty() || text.size() > 9) return std::nullopt;
  if (text.size() > 1 && text.front() == '0') return std::nullopt;
  int64_t value = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    value = value * 10 + (c - '0');
  }
  return value;
}

// The text between `before` and `after`, when `text` starts and ends so.
std::optional<absl::string_view> Between(absl::string_view text, absl::string_view before,
                                         absl::string_view after) {
  if (!absl::ConsumePrefix(&text, before) || !absl::ConsumeSuffix(&text, after)) {
    return std::nullopt;
  }
  return text;
}

std::optional<int64_t> NumberBetween(absl::string_view text, absl::string_view before,
                                     absl::string_view after) {
  const auto middle = Between(text, before, after);
  return middle ? ParseNumber(*middle) : std::nullopt;
}

struct RankAndPart {
  int64_t rank = 0;
  int64_t part = 0;
};

// "{rank}{separator}{part}" between `before` and `after`.
std::optional<RankAndPart> RankAndPartBetween(absl::string_view text, absl::string_view before,
                                              absl::string_view separator,
                                              absl::string_view after) {
  const auto middle = Between(text, before, after);
  if (!middle) return std::nullopt;
  const std::vector<absl::string_view> pieces = absl::StrSplit(*middle, separator);
  if (pieces.size() != 2) return std::nullopt;
  const auto rank = ParseNumber(pieces[0]);
  const auto part = ParseNumber(pieces[1]);
  if (!rank || !part) return std::nullopt;
  return RankAndPart{*rank, *part};
}

// `name` is what follows "_shardprep/".
ObjectName ParseWorkName(absl::string_view name) {
  const size_t slash = name.find('/');
  if (slash == absl::string_view::npos) {
    if (absl::ConsumePrefix(&name, "probe-") && IsId(name)) return Probe{std::string(name)};
    return std::monostate();
  }
  const std::string folder(name.substr(0, slash));
  const absl::string_view leaf = name.substr(slash + 1);
  if (folder == "tmp" && IsId(leaf)) return TemporaryFile{std::string(leaf)};
  if (!IsFingerprint(folder)) return std::monostate();
  if (leaf == "commit.json") return CommitIntent{folder};
  if (const auto part = NumberBetween(leaf, "replicated-", ".json")) {
    return ReplicatedJournal{folder, *part};
  }
  if (const auto both = RankAndPartBetween(leaf, "", "-", ".json")) {
    return RankJournal{folder, both->rank, both->part};
  }
  return std::monostate();
}

struct KeyMaker {
  std::string operator()(std::monostate) const {
    SP_CHECK(false);
    return "";
  }
  std::string operator()(const RankPart& n) const {
    return absl::StrCat("model-rank-", Number(n.rank), "-part-", Number(n.part), ".safetensors");
  }
  std::string operator()(const ReplicatedPart& n) const {
    return absl::StrCat("model-replicated-part-", Number(n.part), ".safetensors");
  }
  std::string operator()(const RankManifest& n) const {
    return absl::StrCat("rank-", Number(n.rank), ".json");
  }
  std::string operator()(const ReplicatedManifest&) const { return "replicated.json"; }
  std::string operator()(const ExpertMap& n) const {
    return absl::StrCat("expert-map-rank-", Number(n.rank), ".json");
  }
  std::string operator()(const ManifestName&) const { return "manifest.json"; }
  std::string operator()(const ManifestSignature&) const { return "manifest.json.sig"; }
  std::string operator()(const RankJournal& n) const {
    return absl::StrCat(JournalPrefix(n.fingerprint), Number(n.rank), "-", Number(n.part), ".json");
  }
  std::string operator()(const ReplicatedJournal& n) const {
    return absl::StrCat(JournalPrefix(n.fingerprint), "replicated-", Number(n.part), ".json");
  }
  std::string operator()(const CommitIntent& n) const {
    return absl::StrCat(JournalPrefix(n.fingerprint), "commit.json");
  }
  std::string operator()(const TemporaryFile& n) const {
    SP_CHECK(IsId(n.id));
    return absl::StrCat(kTemporaryPrefix, n.id);
  }
  std::string operator()(const Probe& n) const {
    SP_CHECK(IsId(n.id));
    return absl::StrCat(kWorkPrefix, "probe-", n.id);
  }
};

absl::Status BadKey(const std::string& key, absl::string_view reason) {
  // Keys come from outside: keep the message printable and short.
  const std::string shown = absl::CHexEscape(key.substr(0, 200));
  return absl::InvalidArgumentError(absl::StrCat("object key \"", shown, "\": ", reason));
}

}  // namespace

bool IsFingerprint(const std::string& text) {
  return text.size() == 64 && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

std::string JournalPrefix(const std::string& fingerprint) {
  SP_CHECK(IsFingerprint(fingerprint));
  return absl::StrCat(kWorkPrefix, fingerprint, "/");
}

std::string ObjectKey(const ObjectName& name) { return std::visit(KeyMaker(), name); }

ObjectName ParseObjectName(const std::string& key) {
  absl::string_view work_name = key;
  if (absl::ConsumePrefix(&work_name, kWorkPrefix)) return ParseWorkName(work_name);
  if (key == "manifest.json") return ManifestName{};
  if (key == "manifest.json.sig") return ManifestSignature{};
  if (key == "replicated.json") return ReplicatedManifest{};
  if (const auto rank = NumberBetween(key, "rank-", ".json")) return RankManifest{*rank};
  if (const auto rank = NumberBetween(key, "expert-map-rank-", ".json")) return ExpertMap{*rank};
  if (const auto part = NumberBetween(key, "model-replicated-part-", ".safetensors")) {
    return ReplicatedPart{*part};
  }
  if (const auto both = RankAndPartBetween(key, "model-rank-", "-part-", ".safetensors")) {
    return RankPart{both->rank, both->part};
  }
  return std::monostate();
}

absl::StatusOr<std::string> CopiedFileKey(const std::string& source_name) {
  SP_RETURN_IF_ERROR(ValidateObjectKey(source_name));
  const bool is_ours = !std::holds_alternative<std::monostate>(ParseObjectName(source_name));
  const std::string first_segment = source_name.substr(0, source_name.find('/'));
  if (is_ours || absl::StrCat(first_segment, "/") == kWorkPrefix) {
    return BadKey(source_name, "a copied file must not carry a name that prepared output uses");
  }
  return source_name;
}

absl::Status ValidateObjectKey(const std::string& key) {
  if (key.empty()) return BadKey(key, "empty");
  if (static_cast<int64_t>(key.size()) > kMaxKeyBytes) {
    return BadKey(key, absl::StrCat(key.size(), " bytes, want at most ", kMaxKeyBytes));
  }
  if (key.front() == '/') return BadKey(key, "starts with a slash, want a relative name");
  if (key.find('\\') != std::string::npos) return BadKey(key, "holds a backslash");
  if (key.find('\0') != std::string::npos) return BadKey(key, "holds a NUL");
  for (const absl::string_view segment : absl::StrSplit(key, '/')) {
    if (segment.empty()) return BadKey(key, "holds an empty segment");
    if (segment == "." || segment == "..") {
      return BadKey(key, absl::StrCat("holds the segment \"", segment, "\""));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateObjectPrefix(const std::string& prefix) {
  if (prefix.empty()) return absl::OkStatus();
  if (prefix.back() != '/') return BadKey(prefix, "a prefix must end with a slash");
  return ValidateObjectKey(prefix.substr(0, prefix.size() - 1));
}

}  // namespace shardprep
