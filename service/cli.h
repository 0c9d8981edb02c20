// The command line `shardprep`: its commands and what they share.
//
// A command takes the words after its name, does its work and returns the exit code. Results go to
// standard output, progress, logs and errors to standard error.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "service/flag_set.h"
#include "shardprep/v1/prep.pb.h"
#include "shardprep/v1/target.pb.h"

namespace google::protobuf {
class Message;
}  // namespace google::protobuf

namespace shardprep {

class Interrupts;

// Exit codes; an interrupted command exits with 128 + the signal's number (130 after Ctrl-C).
inline constexpr int kExitOk = 0;
inline constexpr int kExitFailure = 1;
inline constexpr int kExitUsage = 2;

// What a command gets from main.
struct CliContext {
  std::string working_directory;  // physical, absolute: where relative paths start
  Interrupts* interrupts = nullptr;
  // Reads an environment variable.
  std::function<std::optional<std::string>(const std::string& name)> environment;
};

using CliArguments = std::vector<std::string>;

int RunPrepare(const CliContext& context, const CliArguments& arguments);
int RunPlan(const CliContext& context, const CliArguments& arguments);
int RunSubmit(const CliContext& context, const CliArguments& arguments);
int RunGet(const CliContext& context, const CliArguments& arguments);
int RunList(const CliContext& context, const CliArguments& arguments);
int RunWatch(const CliContext& context, const CliArguments& arguments);
int RunCancel(const CliContext& context, const CliArguments& arguments);
int RunVerify(const CliContext& context, const CliArguments& arguments);
int RunDoctor(const CliContext& context, const CliArguments& arguments);
int RunSign(const CliContext& context, const CliArguments& arguments);
int RunFetch(const CliContext& context, const CliArguments& arguments);
int RunLayout(const CliContext& context, const CliArguments& arguments);
int RunBench(const CliContext& context, const CliArguments& arguments);

// Parses. An exit code when that settles the matter: 0 after help was asked for and printed, 2
// after a usage error, which is printed with where to find help.
std::optional<int> ParseOrExit(FlagSet& flags, const std::string& command,
                               const CliArguments& arguments);

// Prints "shardprep COMMAND: CODE: message" and, where `next_step` is not empty, what to do next.
// Returns kExitFailure.
int Fail(const std::string& command, const absl::Status& status, const std::string& next_step = "");

// `message` as protobuf JSON on standard output: indented, or in one line.
absl::Status PrintJson(const google::protobuf::Message& message, bool one_line = false);

// Of source and destinations, in the order of the spec.
std::vector<std::string> UrisOf(const v1::PrepJobSpec& spec);
// Of the destinations, for people.
std::string DestinationsText(const v1::PrepJobSpec& spec);

// Flags that say what to prepare; the same for prepare, plan and submit. One target by flags, or
// several by a file.
class SpecFlags {
 public:
  SpecFlags();
  void AddTo(FlagSet& flags);
  // The spec with absolute URIs. INVALID_ARGUMENT naming the flag, or file and entry; for files
  // also what reading them comes to.
  absl::StatusOr<v1::PrepJobSpec> Spec(const std::string& working_directory) const;

 private:
  void AddTargetTo(FlagSet& flags);
  void AddKernelTo(FlagSet& flags);
  absl::Status SetTarget(const std::string& working_directory, v1::Target& target) const;
  absl::Status AddTargetsOfFile(const std::string& working_directory, v1::PrepJobSpec& spec) const;

  std::string source_;
  std::string targets_;
  std::string destination_;
  int64_t tensor_parallel_size_ = 0;
  int64_t data_parallel_size_ = 1;
  int64_t expert_parallel_size_ = 1;
  std::string expert_placement_ = "linear";
  int64_t redundant_experts_ = 0;
  std::string expert_map_;
  std::string state_dict_;
  std::string naming_ = "vllm";
  std::string backend_ = "AUTO";
  std::string activation_;
  bool force_activation_ = false;
  std::string architecture_ = "gfx950";
  std::string profile_ = "aiter-separated";
  bool include_mtp_ = false;
  bool self_contained_ = false;
  bool slice_dense_ = false;
  bool experts_only_ = false;
  int64_t part_size_bytes_ = int64_t{2} << 30;
  std::string alignment_policy_;
  bool verify_after_write_ = false;
};

// Flags that say how a job is run on this machine; for prepare and, so that a command line can be
// tried first, for plan.
struct RunFlags {
  void AddTo(FlagSet& flags);

  int64_t workers = 1;
  int64_t threads = 0;
  std::string device = "auto";
  int64_t memory_budget_bytes = int64_t{512} << 20;
  std::string metrics_listen;
  std::string allow_source_root;
  std::string sign_key;
};

// How long a job may take; for prepare and submit.
class TimeoutFlag {
 public:
  void AddTo(FlagSet& flags);
  void Apply(v1::CreatePrepJobRequest& request) const;

 private:
  std::optional<absl::Duration> timeout_;
};

// A comma-separated list of directories, absolute. INVALID_ARGUMENT naming `flag`.
absl::StatusOr<std::vector<std::string>> DirectoryList(const std::string& text,
                                                       const std::string& flag,
                                                       const std::string& working_directory);

// Text of an alignment policy file that parses. Errors begin with the path.
absl::StatusOr<std::string> ReadPolicyText(const std::string& path);

}  // namespace shardprep
