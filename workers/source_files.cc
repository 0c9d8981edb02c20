#include "workers/source_files.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/status_macros.h"

namespace shardprep {

absl::StatusOr<ObjectReader*> SourceFiles::Get(int64_t file) {
  File& entry = EntryOf(file);
  // Whoever needs another file does not wait for this one to be opened.
  absl::MutexLock lock(&entry.mu);
  if (entry.reader == nullptr) {
    const CheckpointFile& known = checkpoint_.files()[file];
    SP_ASSIGN_OR_RETURN(auto opened, store_.Open(known.name));
    if (opened->info().etag != known.etag) {
      return absl::DataLossError(absl::StrCat(known.name,
                                              ": changed since it was planned: version ",
                                              opened->info().etag, ", want ", known.etag));
    }
    entry.reader = std::move(opened);
  }
  return entry.reader.get();
}

absl::Status SourceFiles::Read(int64_t file, int64_t offset, absl::Span<uint8_t> out) {
  StageTimer timer(progress_, Stage::kRead);
  SP_ASSIGN_OR_RETURN(ObjectReader * reader, Get(file));
  SP_RETURN_IF_ERROR(reader->ReadAt(offset, out));
  progress_.bytes_read += static_cast<int64_t>(out.size());
  return absl::OkStatus();
}

absl::Status SourceFiles::CheckUnchanged() {
  std::vector<ObjectReader*> opened;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [number, file] : files_) {
      absl::MutexLock file_lock(&file->mu);
      if (file->reader != nullptr) opened.push_back(file->reader.get());
    }
  }
  for (ObjectReader* reader : opened) SP_RETURN_IF_ERROR(reader->CheckUnchanged());
  return absl::OkStatus();
}

SourceFiles::File& SourceFiles::EntryOf(int64_t file) {
  absl::MutexLock lock(&mu_);
  std::unique_ptr<File>& entry = files_[file];
  if (entry == nullptr) entry = std::make_unique<File>();
  return *entry;
}

}  // namespace shardprep
