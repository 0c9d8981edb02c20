#include "service/flag_set.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "kernels/status_macros.h"
#include "workers/byte_size.h"

namespace shardprep {
namespace {

constexpr int kColumns = 100;
constexpr int kHelpIndent = 34;

// Insertions, deletions and replacements that turn `a` into `b`.
size_t EditDistance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

absl::Status BadValue(const std::string& name, const std::string& value, const std::string& want) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": '", value, "', want ", want));
}

// "  --name VALUE", then the help text in its own column.
std::string HelpEntry(const std::string& head, const std::string& text) {
  std::string entry = absl::StrCat("  ", head);
  if (entry.size() + 2 > kHelpIndent) {
    absl::StrAppend(&entry, "\n", std::string(kHelpIndent, ' '));
  } else {
    entry.resize(kHelpIndent, ' ');
  }
  return absl::StrCat(entry, WrapText(text, kHelpIndent, kColumns), "\n");
}

// A value as a shell reads it, for the defaults.
std::string DefaultText(const std::string& value) {
  return value.empty() ? "" : absl::StrCat("Default: ", value, ".");
}

std::string SizeDefault(int64_t bytes) {
  if (bytes == 0) return "";
  constexpr std::pair<int, const char*> kUnits[] = {{30, "GiB"}, {20, "MiB"}, {10, "KiB"}};
  for (const auto& [shift, name] : kUnits) {
    if ((bytes >> shift) << shift == bytes) return absl::StrCat(bytes >> shift, name);
  }
  return absl::StrCat(bytes);
}

}  // namespace

std::string NearestWord(const std::string& word, const std::vector<std::string>& candidates) {
  std::string nearest;
  size_t least = std::max<size_t>(2, word.size() / 4) + 1;
  for (const std::string& candidate : candidates) {
    const size_t distance = EditDistance(word, candidate);
    if (distance >= least || distance >= candidate.size()) continue;
    least = distance;
    nearest = candidate;
  }
  if (!nearest.empty() || word.size() < 3) return nearest;
  // A cut-off word is no misspelling, but as clear when only one candidate continues it.
  for (const std::string& candidate : candidates) {
    if (!absl::StartsWith(candidate, word)) continue;
    if (!nearest.empty()) return "";
    nearest = candidate;
  }
  return nearest;
}

std::string WrapText(const std::string& text, int indent, int columns) {
  const std::string margin(static_cast<size_t>(indent), ' ');
  const size_t width = static_cast<size_t>(std::max(columns - indent, 20));
  std::vector<std::string> lines;
  for (const absl::string_view paragraph : absl::StrSplit(text, '\n')) {
    std::string line;
    for (const absl::string_view word : absl::StrSplit(paragraph, ' ', absl::SkipEmpty())) {
      if (!line.empty() && line.size() + 1 + word.size() > width) {
        lines.push_back(std::move(line));
        line.clear();
      }
      absl::StrAppend(&line, line.empty() ? "" : " ", word);
    }
    lines.push_back(std::move(line));
  }
  return absl::StrJoin(lines, absl::StrCat("\n", margin));
}

FlagSet::FlagSet(CommandHelp help) : help_(std::move(help)) {}

void FlagSet::Add(Flag flag) {
  for (const Flag& other : flags_) SP_CHECK(other.name != flag.name);
  flags_.push_back(std::move(flag));
}

void FlagSet::String(const std::string& name, const std::string& value_name,
                     const std::string& help, std::string* value, Presence presence) {
  Add({.name = name,
       .value_name = value_name,
       .help = help,
       .default_text = DefaultText(*value),
       .required = presence == Presence::kRequired,
       .assign = [name, value](const std::string& text) {
         if (text.empty()) return BadValue(name, text, "a value that is not empty");
         *value = text;
         return absl::OkStatus();
       }});
}

void FlagSet::Int(const std::string& name, const std::string& value_name, const std::string& help,
                  int64_t least, int64_t most, int64_t* value, Presence presence) {
  const bool required = presence == Presence::kRequired;
  Add({.name = name,
       .value_name = value_name,
       .help = help,
       .default_text = required ? "" : DefaultText(absl::StrCat(*value)),
       .required = required,
       .assign = [name, least, most, value](const std::string& text) {
         int64_t number = 0;
         if (!absl::SimpleAtoi(text, &number) || number < least || number > most) {
           return BadValue(name, text, absl::StrCat("a number from ", least, " to ", most));
         }
         *value = number;
         return absl::OkStatus();
       }});
}

void FlagSet::Size(const std::string& name, const std::string& help, int64_t* bytes) {
  Add({.name = name,
       .value_name = "SIZE",
       .help = help,
       .default_text = DefaultText(SizeDefault(*bytes)),
       .assign = [name, bytes](const std::string& text) {
         const absl::StatusOr<int64_t> size = ParseByteSize(text);
         if (!size.ok() || *size == 0) {
           return BadValue(name, text, "bytes, or a whole number of KiB, MiB, GiB or TiB");
         }
         *bytes = *size;
         return absl::OkStatus();
       }});
}

void FlagSet::Bool(const std::string& name, const std::string& help, bool* value) {
  Add({.name = name,
       .value_name = "",
       .help = help,
       .default_text = DefaultText(*value ? "true" : ""),
       .assign = [name, value](const std::string& text) {
         if (text != "true" && text != "false") return BadValue(name, text, "true or false");
         *value = text == "true";
         return absl::OkStatus();
       }});
}

void FlagSet::Choice(const std::string& name, const std::vector<std::string>& choices,
                     const std::string& help, std::string* value) {
  Add({.name = name,
       .value_name = "NAME",
       .help = absl::StrCat(help, " One of ", absl::StrJoin(choices, ", "), "."),
       .default_text = DefaultText(*value),
       .assign = [name, choices, value](const std::string& text) {
         if (std::find(choices.begin(), choices.end(), text) == choices.end()) {
           return BadValue(name, text, absl::StrCat("one of ", absl::StrJoin(choices, ", ")));
         }
         *value = text;
         return absl::OkStatus();
       }});
}

void FlagSet::Strings(const std::string& name, const std::string& value_name,
                      const std::string& help, std::vector<std::string>* values) {
  Add({.name = name,
       .value_name = value_name,
       .help = absl::StrCat(help, " May be given more than once."),
       .default_text = "",
       .repeats = true,
       .assign = [name, values](const std::string& text) {
         if (text.empty()) return BadValue(name, text, "a value that is not empty");
         values->push_back(text);
         return absl::OkStatus();
       }});
}

void FlagSet::Value(const std::string& name, const std::string& value_name, const std::string& help,
                    std::function<absl::Status(const std::string&)> assign, Presence presence) {
  Add({.name = name,
       .value_name = value_name,
       .help = help,
       .default_text = "",
       .required = presence == Presence::kRequired,
       .assign = [name, assign = std::move(assign)](const std::string& text) {
         const absl::Status status = assign(text);
         if (status.ok()) return absl::OkStatus();
         return absl::InvalidArgumentError(
             absl::StrCat("--", name, ": ", std::string(status.message())));
       }});
}

void FlagSet::Instead(const std::string& name, const std::vector<std::string>& others) {
  Find(name);
  for (const std::string& other : others) {
    const auto flag = std::find_if(flags_.begin(), flags_.end(),
                                   [&other](const Flag& f) { return f.name == other; });
    SP_CHECK(flag != flags_.end());
    flag->instead = name;
  }
}

void FlagSet::Argument(const std::string& name, const std::string& help, std::string* value) {
  arguments_.push_back({.name = name,
                        .value_name = "",
                        .help = help,
                        .default_text = "",
                        .required = true,
                        .assign = [name, value](const std::string& text) {
                          if (text.empty()) {
                            return absl::InvalidArgumentError(absl::StrCat(name, " is empty"));
                          }
                          *value = text;
                          return absl::OkStatus();
                        }});
}

absl::Status FlagSet::ParseFlag(const std::vector<std::string>& arguments, size_t* at) {
  const std::string& word = arguments[*at];
  const size_t equals = word.find('=');
  const std::string name = word.substr(2, equals == std::string::npos ? equals : equals - 2);
  const auto flag =
      std::find_if(flags_.begin(), flags_.end(), [&name](const Flag& f) { return f.name == name; });
  if (flag == flags_.end()) {
    std::vector<std::string> names;
    names.reserve(flags_.size());
    for (const Flag& known : flags_) names.push_back(known.name);
    const std::string nearest = NearestWord(name, names);
    return absl::InvalidArgumentError(
        absl::StrCat("unknown flag --", name,
                     nearest.empty() ? "" : absl::StrCat("; did you mean --", nearest, "?")));
  }
  if (flag->set && !flag->repeats)
    return absl::InvalidArgumentError(absl::StrCat("--", name, " is given twice"));
  flag->set = true;
  if (equals != std::string::npos) return flag->assign(word.substr(equals + 1));
  if (flag->value_name.empty()) return flag->assign("true");
  if (*at + 1 == arguments.size() || absl::StartsWith(arguments[*at + 1], "--")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", name, " needs a value: --", name, " ", flag->value_name));
  }
  ++*at;
  return flag->assign(arguments[*at]);
}

absl::Status FlagSet::CheckMissing(size_t arguments_found) const {
  if (arguments_found < arguments_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the argument ", arguments_[arguments_found].name, " is missing"));
  }
  for (const Flag& flag : flags_) {
    if (!flag.required || flag.set) continue;
    if (!flag.instead.empty() && Find(flag.instead).set) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag.name, " ", flag.value_name, " is missing"));
  }
  return absl::OkStatus();
}

absl::Status FlagSet::CheckInstead() const {
  for (const Flag& flag : flags_) {
    if (flag.instead.empty() || !flag.set || !Find(flag.instead).set) continue;
    std::vector<std::string> beside;
    for (const Flag& other : flags_) {
      if (other.set && other.instead == flag.instead) beside.push_back("--" + other.name);
    }
    return absl::InvalidArgumentError(absl::StrCat("--", flag.instead, " is given, and beside it ",
                                                   absl::StrJoin(beside, ", "),
                                                   ", which it stands for"));
  }
  return absl::OkStatus();
}

absl::Status FlagSet::Parse(const std::vector<std::string>& arguments) {
  help_wanted_ = false;
  for (Flag& flag : flags_) flag.set = false;
  size_t arguments_found = 0;
  bool flags_may_follow = true;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const std::string& word = arguments[at];
    if (flags_may_follow && word == "--") {
      flags_may_follow = false;
      continue;
    }
    if (flags_may_follow && (word == "--help" || word == "-h")) {
      help_wanted_ = true;
      return absl::OkStatus();
    }
    if (flags_may_follow && absl::StartsWith(word, "--")) {
      SP_RETURN_IF_ERROR(ParseFlag(arguments, &at));
      continue;
    }
    if (flags_may_follow && word.size() > 1 && word.front() == '-') {
      return absl::InvalidArgumentError(
          absl::StrCat("unknown flag ", word, "; flags begin with two dashes"));
    }
    if (arguments_found == arguments_.size()) {
      return absl::InvalidArgumentError(absl::StrCat("unexpected argument '", word, "'"));
    }
    SP_RETURN_IF_ERROR(arguments_[arguments_found++].assign(word));
  }
  SP_RETURN_IF_ERROR(CheckInstead());
  return CheckMissing(arguments_found);
}

const FlagSet::Flag& FlagSet::Find(const std::string& name) const {
  const auto flag =
      std::find_if(flags_.begin(), flags_.end(), [&name](const Flag& f) { return f.name == name; });
  SP_CHECK(flag != flags_.end());
  return *flag;
}

bool FlagSet::IsSet(const std::string& name) const { return Find(name).set; }

std::string FlagSet::Help() const {
  std::string usage = absl::StrCat("usage: ", help_.command);
  for (const Flag& argument : arguments_) absl::StrAppend(&usage, " ", argument.name);
  bool has_optional = false;
  for (const Flag& flag : flags_) {
    has_optional = has_optional || !flag.required;
    if (flag.required) absl::StrAppend(&usage, " --", flag.name, " ", flag.value_name);
  }
  std::string text = absl::StrCat(WrapText(usage, 8, kColumns), has_optional ? " [flags]" : "",
                                  "\n\n", WrapText(help_.summary, 0, kColumns), "\n");
  if (!arguments_.empty()) absl::StrAppend(&text, "\nArguments:\n");
  for (const Flag& argument : arguments_) {
    absl::StrAppend(&text, HelpEntry(argument.name, argument.help));
  }
  absl::StrAppend(&text, "\nFlags:\n");
  for (const Flag& flag : flags_) {
    const std::string head = flag.value_name.empty()
                                 ? absl::StrCat("--", flag.name)
                                 : absl::StrCat("--", flag.name, " ", flag.value_name);
    std::string help = flag.help;
    if (flag.required) {
      absl::StrAppend(&help, flag.instead.empty()
                                 ? " Required."
                                 : absl::StrCat(" Required without --", flag.instead, "."));
    }
    if (!flag.default_text.empty()) absl::StrAppend(&help, " ", flag.default_text);
    absl::StrAppend(&text, HelpEntry(head, help));
  }
  absl::StrAppend(&text, HelpEntry("--help", "Prints this."));
  if (!help_.example.empty()) absl::StrAppend(&text, "\nExample:\n", help_.example, "\n");
  return text;
}

}  // namespace shardprep
