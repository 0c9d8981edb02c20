// The flags of one command, declared once: parsing and help text come from the same list.
//
//   FlagSet flags({.command = "shardprep verify", .summary = "Reads an artefact back.", ...});
//   flags.Argument("DESTINATION", "Directory of the artefact.", &destination);
//   flags.Int("threads", "N", "Threads that check.", 1, 1024, &threads);
//   SP_RETURN_IF_ERROR(flags.Parse(arguments));
//
// `--name value` and `--name=value` mean the same, except that a value that begins with `--` needs
// the second form: a forgotten value is not made up from the next flag. A bool flag takes no value
// but `=true` or `=false`. `--` ends the flags. Everything unknown is refused, and everything twice
// but what Strings() declares.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"

namespace shardprep {

// What stands around the flags in the help text.
struct CommandHelp {
  std::string command;  // as typed, "shardprep prepare"
  std::string summary;  // one or more sentences
  std::string example;  // whole command lines
};

// Not thread safe. Variables that flags write to must outlive Parse(); their values before it are
// the defaults, and are shown as such in the help text.
class FlagSet {
 public:
  enum class Presence { kOptional, kRequired };

  explicit FlagSet(CommandHelp help);

  // Names are lower case with dashes, without the leading ones. `value_name` stands for the value
  // in the help text.
  void String(const std::string& name, const std::string& value_name, const std::string& help,
              std::string* value, Presence presence = Presence::kOptional);
  // A decimal number in [least, most].
  void Int(const std::string& name, const std::string& value_name, const std::string& help,
           int64_t least, int64_t most, int64_t* value, Presence presence = Presence::kOptional);
  // Bytes as ParseByteSize() takes them, at least 1.
  void Size(const std::string& name, const std::string& help, int64_t* bytes);
  void Bool(const std::string& name, const std::string& help, bool* value);
  // One of `choices`.
  void Choice(const std::string& name, const std::vector<std::string>& choices,
              const std::string& help, std::string* value);
  // May be given more than once; each adds a value.
  void Strings(const std::string& name, const std::string& value_name, const std::string& help,
               std::vector<std::string>* values);
  // A value with a grammar of its own: `assign` takes it, or says what is wrong with it.
  void Value(const std::string& name, const std::string& value_name, const std::string& help,
             std::function<absl::Status(const std::string&)> assign,
             Presence presence = Presence::kOptional);
  // Says that the flag `name` stands for all of `others`, each declared before: beside it none of
  // them may be given, and with it none is required.
  void Instead(const std::string& name, const std::vector<std::string>& others);
  // A required argument without a name; they are taken in the order of declaration.
  void Argument(const std::string& name, const std::string& help, std::string* value);

  // Sets the variables from the words after the command. INVALID_ARGUMENT, naming the flag and what
  // it wants, for anything that is not as declared; an unknown flag's message names the nearest
  // known one. Variables of flags before the wrong one are set then. `--help` and `-h` end parsing
  // with OK: ask help_wanted() before anything else.
  absl::Status Parse(const std::vector<std::string>& arguments);

  bool help_wanted() const { return help_wanted_; }

  // Whether the last Parse() met the flag.
  bool IsSet(const std::string& name) const;

  // Usage, summary, arguments and flags with their defaults, and the example; lines of at most 100
  // columns where words allow.
  std::string Help() const;

 private:
  struct Flag {
    std::string name;
    std::string value_name;  // empty for bool flags
    std::string help;
    std::string default_text;
    std::string instead;  // the flag that stands for this one, if any
    bool required = false;
    bool repeats = false;
    bool set = false;
    std::function<absl::Status(const std::string&)> assign;
  };

  void Add(Flag flag);
  const Flag& Find(const std::string& name) const;
  absl::Status CheckInstead() const;
  absl::Status ParseFlag(const std::vector<std::string>& arguments, size_t* at);
  absl::Status CheckMissing(size_t arguments_found) const;

  CommandHelp help_;
  std::vector<Flag> flags_;
  std::vector<Flag> arguments_;
  bool help_wanted_ = false;
};

// The candidate that `word` is most likely a misspelling of, or empty when none is near.
std::string NearestWord(const std::string& word, const std::vector<std::string>& candidates);

// `text` in lines of at most `columns`, each but the first after `indent` spaces; breaks at spaces
// only and keeps line feeds.
std::string WrapText(const std::string& text, int indent, int columns);

}  // namespace shardprep
