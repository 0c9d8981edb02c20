// `shardprep layout`: one layout on raw bytes, and the list of layouts.
//
// The output file appears whole or not at all: (1) it is written under a temporary name in the
// same directory and made durable, (2) renamed, (3) the directory is made durable. An error or a
// signal before (2) removes the temporary file.
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "kernels/layout.h"
#include "kernels/status_macros.h"
#include "service/cli.h"
#include "service/cli_signals.h"
#include "service/plan_report.h"
#include "workers/byte_size.h"

namespace shardprep {
namespace {

constexpr char kApplyCommand[] = "layout apply";
constexpr char kExample[] =
    "  shardprep layout apply --layout aiter-e8m0 --shape 2,768,224 --input scale.bin \\\n"
    "    --output scale.shuffled.bin";

struct ApplyFlags {
  LayoutId layout = LayoutId::kRowMajor;
  MatrixShape shape{};
  std::string input;
  std::string output;
  bool inverse = false;
};

absl::Status FileError(const std::string& path, const char* what) {
  const int error = errno;
  const std::string message = absl::StrCat(path, ": ", what, ": ", std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(message);
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(message);
  return absl::FailedPreconditionError(message);
}

class FileDescriptor {
 public:
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) close(fd_);
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

absl::StatusOr<std::vector<uint8_t>> Allocate(int64_t size_bytes) {
  try {
    return std::vector<uint8_t>(static_cast<size_t>(size_bytes));
  } catch (const std::exception&) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", FormatThousands(size_bytes), " bytes"));
  }
}

absl::StatusOr<std::vector<uint8_t>> ReadExactly(const std::string& path, int64_t want_bytes) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) return FileError(path, "cannot be opened");
  struct stat info = {};
  if (fstat(file.get(), &info) != 0) return FileError(path, "cannot be read");
  if (!S_ISREG(info.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is not a regular file"));
  }
  if (info.st_size != want_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", info.st_size, " bytes, want ", want_bytes));
  }
  SP_ASSIGN_OR_RETURN(std::vector<uint8_t> bytes, Allocate(want_bytes));
  size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t got = read(file.get(), bytes.data() + at, bytes.size() - at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(path, "cannot be read");
    if (got == 0) {
      return absl::DataLossError(
          absl::StrCat(path, ": ends at byte ", at, " of ", want_bytes, " while it is read"));
    }
    at += static_cast<size_t>(got);
  }
  return bytes;
}

absl::Status WriteDurably(const std::string& path, const std::vector<uint8_t>& bytes) {
  const FileDescriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (file.get() < 0) return FileError(path, "cannot be created");
  size_t at = 0;
  while (at < bytes.size()) {
    const ssize_t wrote = write(file.get(), bytes.data() + at, bytes.size() - at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return FileError(path, "cannot be written");
    at += static_cast<size_t>(wrote);
  }
  if (fsync(file.get()) != 0) return FileError(path, "cannot be made durable");
  return absl::OkStatus();
}

absl::Status PublishFile(const std::string& temporary, const std::string& path,
                         const std::string& directory) {
  if (rename(temporary.c_str(), path.c_str()) != 0) return FileError(path, "cannot be replaced");
  const FileDescriptor parent(open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.get() < 0 || fsync(parent.get()) != 0) {
    return FileError(directory, "cannot be made durable");
  }
  return absl::OkStatus();
}

// The protocol at the top of this file.
absl::Status WriteAtomically(const std::string& path, const std::vector<uint8_t>& bytes,
                             Interrupts& interrupts) {
  const size_t slash = path.rfind('/');
  const std::string directory =
      slash == std::string::npos ? "." : path.substr(0, std::max<size_t>(slash, 1));
  const std::string name = slash == std::string::npos ? path : path.substr(slash + 1);
  if (name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("--output: '", path, "' names no file"));
  }
  const std::string temporary = absl::StrCat(directory, "/.", name, ".tmp-", getpid());
  interrupts.Handle([temporary](int signal) {
    unlink(temporary.c_str());
    _exit(128 + signal);
  });
  absl::Status status = WriteDurably(temporary, bytes);
  if (status.ok()) status = PublishFile(temporary, path, directory);
  if (!status.ok()) unlink(temporary.c_str());
  interrupts.Handle(nullptr);
  return status;
}

absl::StatusOr<MatrixShape> ParseShape(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ',');
  MatrixShape shape{};
  if (parts.size() == 3 && absl::SimpleAtoi(parts[0], &shape.experts) &&
      absl::SimpleAtoi(parts[1], &shape.rows) && absl::SimpleAtoi(parts[2], &shape.cols)) {
    return shape;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("'", text, "', want experts,rows,bytes-a-row, for example 2,768,224"));
}

// Returns the size of the output in bytes.
absl::StatusOr<int64_t> Apply(const CliContext& context, const ApplyFlags& flags) {
  const LayoutId layout = flags.layout;
  const MatrixShape shape = flags.shape;
  SP_ASSIGN_OR_RETURN(const int64_t padded_bytes, OutputBytes(layout, shape));
  const int64_t plain_bytes = shape.experts * shape.rows * shape.cols;
  SP_ASSIGN_OR_RETURN(const std::vector<uint8_t> in,
                      ReadExactly(flags.input, flags.inverse ? padded_bytes : plain_bytes));
  SP_ASSIGN_OR_RETURN(std::vector<uint8_t> out,
                      Allocate(flags.inverse ? plain_bytes : padded_bytes));
  SP_RETURN_IF_ERROR(flags.inverse ? InvertLayout(layout, shape, in, absl::MakeSpan(out))
                                   : ApplyLayout(layout, shape, in, absl::MakeSpan(out)));
  SP_RETURN_IF_ERROR(WriteAtomically(flags.output, out, *context.interrupts));
  return static_cast<int64_t>(out.size());
}

int RunApply(const CliContext& context, const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep layout apply",
                 .summary = "Permutes the raw bytes of one tensor as a layout says, or puts them "
                            "back. The shape is that of the plain tensor: experts, rows of one "
                            "expert, bytes (not elements) of a row. Layouts that pad give a larger "
                            "output; aiter-e8m0 takes the rows of all experts as one matrix. The "
                            "input must have exactly the size that the shape says.",
                 .example = kExample});
  ApplyFlags wish;
  flags.Value(
      "layout", "ID", "Layout: see `shardprep layout list`.",
      [&wish](const std::string& text) {
        SP_ASSIGN_OR_RETURN(wish.layout, ParseLayoutId(text));
        return absl::OkStatus();
      },
      FlagSet::Presence::kRequired);
  flags.Value(
      "shape", "E,N,K", "Experts, rows, bytes a row.",
      [&wish](const std::string& text) {
        SP_ASSIGN_OR_RETURN(wish.shape, ParseShape(text));
        return absl::OkStatus();
      },
      FlagSet::Presence::kRequired);
  flags.String("input", "FILE", "Raw bytes to read.", &wish.input, FlagSet::Presence::kRequired);
  flags.String("output", "FILE", "File to write; it appears when it is whole.", &wish.output,
               FlagSet::Presence::kRequired);
  flags.Bool("inverse", "Undoes the layout; every byte of padding is checked against its fill.",
             &wish.inverse);
  if (const auto exit_code = ParseOrExit(flags, kApplyCommand, arguments)) return *exit_code;

  const auto bytes = Apply(context, wish);
  if (!bytes.ok()) return Fail(kApplyCommand, bytes.status());
  std::printf("%s: %s B\n", wish.output.c_str(), FormatThousands(*bytes).c_str());
  return kExitOk;
}

int RunListLayouts(const CliArguments& arguments) {
  FlagSet flags({.command = "shardprep layout list",
                 .summary = "Lists the layouts: id, AITER function, value of the bytes that no "
                            "input byte lands on, and source.",
                 .example = "  shardprep layout list"});
  if (const auto exit_code = ParseOrExit(flags, "layout list", arguments)) return *exit_code;
  std::vector<std::vector<std::string>> table = {{"layout", "AITER", "fill", "source"}};
  for (const LayoutInfo& info : AllLayouts()) {
    table.push_back(
        {info.name, info.aiter_function, absl::StrFormat("0x%02x", info.fill), info.source});
  }
  std::fputs(AlignedTable(table, 4).c_str(), stdout);
  return kExitOk;
}

}  // namespace

int RunLayout(const CliContext& context, const CliArguments& arguments) {
  if (!arguments.empty()) {
    const std::string& word = arguments.front();
    const CliArguments rest(arguments.begin() + 1, arguments.end());
    if (word == "apply") return RunApply(context, rest);
    if (word == "list") return RunListLayouts(rest);
    if (word == "--help" || word == "-h") {
      std::printf(
          "usage: shardprep layout apply|list [flags]\n\n"
          "  apply   Permutes the raw bytes of one tensor, or puts them back.\n"
          "  list    Lists the layouts.\n\n"
          "Example:\n%s\n",
          kExample);
      return kExitOk;
    }
  }
  std::fprintf(stderr, "shardprep layout: %s, want apply or list\nSee: shardprep layout --help\n",
               arguments.empty() ? "a command is missing"
                                 : ("unknown command '" + arguments.front() + "'").c_str());
  return kExitUsage;
}

}  // namespace shardprep
