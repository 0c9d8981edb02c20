#include "workers/region_prep.h"

#include <algorithm>
#include <atomic>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/hip/lane_shuffler.h"
#include "kernels/layout.h"
#include "tests/kernels/emulated_gpu.h"
#include "tests/support/meeting_shuffler.h"
#include "tests/support/request_store.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/digest.h"
#include "workers/journal.h"
#include "workers/open_store.h"
#include "workers/proto_json.h"
#include "workers/version.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHidden = 256, kIntermediate = 512, kExperts = 3;

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

class RegionPrepTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), {.hidden = kHidden,
                                                     .intermediate = kIntermediate,
                                                     .experts = kExperts,
                                                     .layers = 1,
                                                     .mtp_layers = 1})
                    .ok());
  }

  v1::PrepJobSpec Spec(int32_t ranks, const std::string& profile, const std::string& destination) {
    v1::PrepJobSpec spec;
    spec.set_source_uri(source_.path());
    spec.set_include_mtp(true);
    v1::Target& target = *spec.add_targets();
    target.mutable_parallel_layout()->set_tensor_parallel_size(ranks);
    target.mutable_kernel_target()->set_profile(profile);
    target.set_destination_uri(destination);
    return spec;
  }

  // Plans and opens both stores.
  void Plan(const v1::PrepJobSpec& spec) {
    auto plan = PlanJob(spec, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    plan_ = *plan;
    auto source = OpenStore(plan_->spec.source_uri(), {});
    auto destination = OpenStore(plan_->target().destination_uri(), {.create = true});
    ASSERT_TRUE(source.ok() && destination.ok());
    source_store_ = std::move(*source);
    destination_store_ = std::move(*destination);
  }

  RegionTask Task(int32_t region, int32_t threads, int64_t memory_bytes) {
    memory_.assign(memory_bytes, 0xEE);  // what a block does not fill must not show
    RegionTask task;
    task.plan = plan_.get();
    task.region = region;
    task.ranks = plan_->slices.RanksOf(plan_->slices.regions()[region]);
    task.source = source_store_.get();
    task.destination = destination_store_.get();
    task.shuffler = shuffler_.get();
    task.threads = threads;
    task.memory = absl::MakeSpan(memory_);
    return task;
  }

  absl::Status PrepareAll(int32_t threads, int64_t memory_bytes) {
    for (size_t region = 0; region < plan_->slices.regions().size(); ++region) {
      const absl::Status status =
          PrepareRegion(Task(static_cast<int32_t>(region), threads, memory_bytes), progress_);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  int64_t Budget(int64_t ranks, int64_t threads) const {
    return plan_->memory.Total(ranks, threads);
  }

  // What the fused tensor of a rank must hold, from the definition: rows r*i + q of gate, then of
  // up, columns r*i... of down, each half padded with zeros, then the layout applied to the whole.
  std::vector<uint8_t> Expected(const FusedTensor& tensor, int64_t layer, int64_t rank) const {
    const SlicePlan& slices = plan_->slices;
    const int64_t i = slices.intermediate().elements();
    const int64_t ip = slices.padded_intermediate().elements();
    const bool scale = tensor.role == Role::kW13Scale || tensor.role == Role::kW2Scale;
    const int64_t per_byte = scale ? 32 : 2;
    const MatrixShape shape{kExperts, tensor.job.rows, tensor.job.padded_cols};
    std::vector<uint8_t> logical(shape.experts * shape.rows * shape.cols, 0);
    for (int64_t e = 0; e < kExperts; ++e) {
      uint8_t* matrix = logical.data() + e * shape.rows * shape.cols;
      if (tensor.halves == 2) {
        for (int64_t half = 0; half < 2; ++half) {
          const ExpertTensor kind =
              half == 0 ? (scale ? kGateScale : kGateWeight) : (scale ? kUpScale : kUpWeight);
          for (int64_t q = 0; q < i; ++q) {
            for (int64_t c = 0; c < kHidden / per_byte; ++c) {
              matrix[(half * ip + q) * shape.cols + c] =
                  ExpectedByte(layer, e, kind, rank * i + q, c);
            }
          }
        }
      } else {
        for (int64_t n = 0; n < kHidden; ++n) {
          for (int64_t c = 0; c < i / per_byte; ++c) {
            matrix[n * shape.cols + c] = ExpectedByte(layer, e, scale ? kDownScale : kDownWeight, n,
                                                      rank * i / per_byte + c);
          }
        }
      }
    }
    std::vector<uint8_t> out(OutputBytes(tensor.job.layout, shape).value());
    EXPECT_TRUE(ApplyLayout(tensor.job.layout, shape, logical, absl::MakeSpan(out)).ok());
    return out;
  }

  // Holds every file of the plan against the model, its digest and its record.
  void CheckAllParts() {
    for (const Region& region : plan_->slices.regions()) {
      for (const int32_t rank : plan_->slices.RanksOf(region)) {
        for (const PartPlan& part : region.parts) CheckPart(region, part, rank);
      }
    }
  }

  void CheckPart(const Region& region, const PartPlan& part, int32_t rank) {
    const std::string key = PartKeyOf(part, rank);
    SCOPED_TRACE(key);
    const std::string bytes = ReadFile(plan_->target().destination_uri() + "/" + key);
    const std::string header = PartHeader(*plan_, part, rank).value();
    ASSERT_EQ(bytes.size(), header.size() + part.data_bytes);
    EXPECT_EQ(bytes.substr(0, header.size()), header);
    for (const PartTensor& tensor : part.tensors) {
      const std::string found = bytes.substr(header.size() + tensor.data_offset, tensor.size_bytes);
      if (region.kind == Region::Kind::kRouted) {
        const std::vector<uint8_t> want =
            Expected(plan_->slices.fused_tensors()[tensor.source], region.layer, rank);
        ASSERT_EQ(found.size(), want.size());
        EXPECT_TRUE(
            std::equal(want.begin(), want.end(), reinterpret_cast<const uint8_t*>(found.data())))
            << tensor.name;
      } else {
        for (int64_t at = 0; at < tensor.size_bytes; ++at) {
          ASSERT_EQ(static_cast<uint8_t>(found[at]), ExpectedOtherByte(tensor.name, at))
              << tensor.name << " byte " << at;
        }
      }
    }
    EXPECT_TRUE(
        IsRecorded(*plan_, {RegionIndex(region), rank, &part}, *destination_store_).value());
  }

  int32_t RegionIndex(const Region& region) const {
    return static_cast<int32_t>(&region - plan_->slices.regions().data());
  }

  TempDir source_;
  TempDir destination_;
  std::shared_ptr<const JobPlan> plan_;
  std::unique_ptr<ObjectStore> source_store_;
  std::unique_ptr<ObjectStore> destination_store_;
  std::unique_ptr<Shuffler> shuffler_ = MakeHostShuffler();
  std::vector<uint8_t> memory_;
  RegionProgress progress_;
};

TEST_F(RegionPrepTest, PartsEqualTheModelForEveryRankCountAndProfile) {
  int job = 0;
  for (const char* profile : {"aiter-separated", "aiter-interleaved", "logical"}) {
    for (const int32_t ranks : {1, 2, 4, 8}) {
      SCOPED_TRACE(::testing::Message() << profile << " T=" << ranks);
      Plan(Spec(ranks, profile, destination_ / absl::StrCat(job++)));
      ASSERT_EQ(PrepareAll(3, Budget(ranks, 3)), absl::OkStatus());
      CheckAllParts();
    }
  }
}

TEST_F(RegionPrepTest, ThreadsBudgetAndRankSetsDoNotChangeTheBytes) {
  Plan(Spec(4, "aiter-separated", destination_ / "one"));
  ASSERT_EQ(PrepareAll(1, Budget(4, 1)), absl::OkStatus());
  CheckAllParts();
  const auto one = plan_;

  Plan(Spec(4, "aiter-separated", destination_ / "sets"));
  for (size_t region = 0; region < plan_->slices.regions().size(); ++region) {
    for (const int32_t rank : plan_->slices.RanksOf(plan_->slices.regions()[region])) {
      RegionTask task = Task(static_cast<int32_t>(region), 2, Budget(1, 1));
      task.ranks = {rank};
      ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
    }
  }
  CheckAllParts();
  EXPECT_EQ(one->fingerprint, plan_->fingerprint);
}

TEST_F(RegionPrepTest, AGpuMakesTheSameBytes) {
  const auto gpu = std::make_shared<EmulatedGpu>();
  shuffler_ = MakeLaneShuffler(gpu, 0, {.slots = 2, .slot_bytes = 4096}).value();
  for (const char* profile : {"aiter-separated", "aiter-interleaved"}) {
    SCOPED_TRACE(profile);
    Plan(Spec(4, profile, destination_ / profile));
    ASSERT_EQ(PrepareAll(3, Budget(4, 3)), absl::OkStatus());
    CheckAllParts();
  }
  EXPECT_THAT(gpu->Problems(), ::testing::IsEmpty());
}

TEST_F(RegionPrepTest, AGpuThatFailsEndsTheRegionWithItsErrorAndNoPart) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  for (const absl::Status& failure : {absl::UnavailableError("fell off the bus"),
                                      absl::ResourceExhaustedError("no device memory")}) {
    const auto gpu = std::make_shared<EmulatedGpu>();
    shuffler_ = MakeLaneShuffler(gpu, 0, {.slots = 2, .slot_bytes = 4096}).value();
    gpu->FailCall(gpu->calls() + 10, failure, /*lost=*/true);
    const absl::Status status = PrepareRegion(Task(0, 3, Budget(4, 3)), progress_);
    EXPECT_EQ(status.code(), failure.code());
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(failure.message())));
    EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
    EXPECT_THAT(gpu->Problems(), ::testing::IsEmpty());
  }
}

TEST_F(RegionPrepTest, EachSourceByteIsReadOnce) {
  Plan(Spec(8, "aiter-separated", destination_ / "out"));
  ASSERT_EQ(PrepareAll(3, Budget(8, 3)), absl::OkStatus());
  EXPECT_EQ(progress_.bytes_read, plan_->slices.NeededSourceBytes());
  EXPECT_EQ(progress_.bytes_written, plan_->summary.output_bytes());
  EXPECT_EQ(progress_.bytes_padded, plan_->slices.PaddingBytesPerRank() * 8);
}

TEST_F(RegionPrepTest, TooLittleMemoryStatesTheMinimum) {
  Plan(Spec(8, "aiter-separated", destination_ / "out"));
  const absl::Status status = PrepareRegion(Task(0, 3, Budget(8, 1) - 1), progress_);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(Budget(8, 1))));
}

TEST_F(RegionPrepTest, RanksAreReportedWhenTheirPartsAreRecorded) {
  v1::PrepJobSpec spec = Spec(4, "aiter-separated", destination_ / "out");
  spec.set_part_size_bytes(4096);  // a part for each fused tensor
  Plan(spec);
  RegionTask task = Task(0, 2, Budget(4, 2));
  std::mutex mu;
  std::vector<int32_t> done;
  task.rank_done = [&](int32_t rank) {
    const std::lock_guard<std::mutex> lock(mu);
    for (const PartPlan& part : plan_->slices.regions()[0].parts) {
      EXPECT_TRUE(IsRecorded(*plan_, {0, rank, &part}, *destination_store_).value());
    }
    done.push_back(rank);
  };
  ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
  EXPECT_THAT(done, ::testing::UnorderedElementsAre(0, 1, 2, 3));

  // Again: everything is recorded, so nothing is read and every rank is reported at once.
  done.clear();
  const int64_t read = progress_.bytes_read;
  ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
  EXPECT_THAT(done, ::testing::UnorderedElementsAre(0, 1, 2, 3));
  EXPECT_EQ(progress_.bytes_read, read);
}

TEST_F(RegionPrepTest, ARecordedPartIsNotDoneAgain) {
  v1::PrepJobSpec spec = Spec(4, "aiter-separated", destination_ / "out");
  spec.set_part_size_bytes(4096);
  Plan(spec);
  int publications = 0;
  RegionTask task = Task(0, 1, Budget(4, 1));
  task.gate = [&]() -> absl::Status {
    // A part and its record each ask once: end in the middle of the second part.
    return ++publications > 11 ? absl::AbortedError("lease over") : absl::OkStatus();
  };
  EXPECT_EQ(PrepareRegion(task, progress_).code(), absl::StatusCode::kAborted);
  RegionProgress second;
  task.gate = {};
  ASSERT_EQ(PrepareRegion(task, second), absl::OkStatus());
  const Region& region = plan_->slices.regions()[0];
  const int64_t headers = int64_t{4} * 4096 * static_cast<int64_t>(region.parts.size());
  EXPECT_LE(second.bytes_written,
            4 * (region.bytes_per_rank - region.parts[0].data_bytes) + headers);
  for (const PartPlan& part : region.parts) {
    for (int32_t rank = 0; rank < 4; ++rank) CheckPart(region, part, rank);
  }
}

TEST_F(RegionPrepTest, ARefusedGateLeavesNoPart) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  RegionTask task = Task(0, 2, Budget(4, 2));
  task.gate = [] { return absl::AbortedError("lease over"); };
  EXPECT_EQ(PrepareRegion(task, progress_).code(), absl::StatusCode::kAborted);
  EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
}

TEST_F(RegionPrepTest, NoPartIsWrittenBesideAnothersManifest) {
  v1::PrepJobSpec spec = Spec(4, "aiter-separated", destination_ / "out");
  spec.set_part_size_bytes(4096);
  Plan(spec);
  RegionTask task = Task(0, 1, Budget(4, 1));
  int publications = 0;
  task.gate = [&]() -> absl::Status {
    // Behind the first part of each rank, with its record.
    if (++publications != 8) return absl::OkStatus();
    return destination_store_->Put("manifest.json", "{}", {}).status();
  };
  const absl::Status status = PrepareRegion(task, progress_);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("another job has committed"));
  int parts = 0;
  const std::vector<ObjectEntry> entries = destination_store_->List("").value();
  for (const ObjectEntry& entry : entries) {
    parts += absl::EndsWith(entry.key, ".safetensors") ? 1 : 0;
  }
  EXPECT_EQ(parts, 4);
}

// Space that ends between a part and its record.
class NoRecordsStore : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  absl::StatusOr<ObjectInfo> Put(const std::string& key, const std::string&,
                                 const CommitGate&) override {
    return absl::ResourceExhaustedError(key + ": no space");
  }
};

TEST_F(RegionPrepTest, APartThatCannotBeRecordedIsRemoved) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  NoRecordsStore no_records(destination_store_.get());
  RegionTask task = Task(0, 2, Budget(4, 2));
  task.destination = &no_records;
  EXPECT_EQ(PrepareRegion(task, progress_).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
}

TEST_F(RegionPrepTest, StopEndsTheWorkAndLeavesNoPart) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  const std::atomic<bool> stop{true};
  RegionTask task = Task(0, 2, Budget(4, 2));
  task.stop = &stop;
  EXPECT_EQ(PrepareRegion(task, progress_).code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
}

TEST_F(RegionPrepTest, ASourceThatChangedAfterPlanningIsDataLoss) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  const std::string name = plan_->slices.checkpoint().files()[0].name;
  std::filesystem::resize_file(source_ / name,
                               plan_->slices.checkpoint().files()[0].size_bytes - 1);
  const absl::Status status = PrepareAll(2, Budget(4, 2));
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(name));
}

// A store whose objects are swapped under the reader at the first read.
class SwappingReader : public ObjectReader {
 public:
  explicit SwappingReader(std::unique_ptr<ObjectReader> reader, std::function<void()> swap)
      : reader_(std::move(reader)), swap_(std::move(swap)) {}
  absl::Status ReadAt(int64_t offset, absl::Span<uint8_t> out) override {
    if (swap_) std::exchange(swap_, nullptr)();
    return reader_->ReadAt(offset, out);
  }
  absl::Status CheckUnchanged() override { return reader_->CheckUnchanged(); }
  const ObjectInfo& info() const override { return reader_->info(); }

 private:
  std::unique_ptr<ObjectReader> reader_;
  std::function<void()> swap_;
};

class SwappingStore : public ForwardingStore {
 public:
  SwappingStore(ObjectStore* store, std::string root)
      : ForwardingStore(store), root_(std::move(root)) {}
  absl::StatusOr<std::unique_ptr<ObjectReader>> Open(const std::string& key) override {
    auto reader = ForwardingStore::Open(key);
    if (!reader.ok()) return reader.status();
    return std::make_unique<SwappingReader>(std::move(*reader), [path = root_ + "/" + key] {
      const std::string copy = ReadFile(path);
      std::ofstream(path + ".new", std::ios::binary) << copy;
      std::filesystem::rename(path + ".new", path);  // same bytes, another file
    });
  }

 private:
  std::string root_;
};

TEST_F(RegionPrepTest, ASourceFileReplacedWhileItIsReadIsDataLossAndLeavesNoPart) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  SwappingStore swapping(source_store_.get(), source_.path());
  RegionTask task = Task(0, 2, Budget(4, 2));
  task.source = &swapping;
  EXPECT_EQ(PrepareRegion(task, progress_).code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
}

TEST_F(RegionPrepTest, VerifyAfterWriteReadsBackWhatWasWritten) {
  v1::PrepJobSpec spec = Spec(2, "aiter-separated", destination_ / "out");
  spec.set_verify_after_write(true);
  Plan(spec);
  ASSERT_EQ(PrepareAll(2, Budget(2, 2)), absl::OkStatus());
  CheckAllParts();
}

TEST_F(RegionPrepTest, NativeCrcRunsOverTheSourceBytesInTheirOwnOrder) {
  for (const char* profile : {"aiter-separated", "aiter-interleaved"}) {
    Plan(Spec(2, profile, destination_ / profile));
    ASSERT_EQ(PrepareAll(2, Budget(2, 2)), absl::OkStatus());
    const int64_t i = plan_->slices.intermediate().elements();
    std::vector<uint8_t> native;  // rank 1, w13: expert, gate/up, row, column
    for (int64_t e = 0; e < kExperts; ++e) {
      for (const ExpertTensor kind : {kGateWeight, kUpWeight}) {
        for (int64_t q = 0; q < i; ++q) {
          for (int64_t c = 0; c < kHidden / 2; ++c) {
            native.push_back(ExpectedByte(0, e, kind, i + q, c));
          }
        }
      }
    }
    const std::string key = absl::StrCat("_shardprep/", plan_->fingerprint, "/1-0.json");
    v1::PartRecord record;
    ASSERT_TRUE(
        ParseStoredJson(destination_store_->Get(key, 1 << 20).value(), key, kFormatVersion, record)
            .ok());
    EXPECT_EQ(record.file().tensors(0).native_crc32c(),
              absl::StrCat(absl::Hex(Crc32c(0, native), absl::kZeroPad8)));
  }
}

// A source whose reads are requests, beside the same source as a directory.
class RequestedSourceTest : public RegionPrepTest {
 protected:
  // Plans for this source, as PlanJob does where it opens such a store.
  void PlanForRequests(const v1::PrepJobSpec& spec, int64_t preferred_read_bytes) {
    Plan(spec);
    requests_ = std::make_unique<RequestStore>(source_store_.get(), preferred_read_bytes);
    auto plan = std::make_shared<JobPlan>(*plan_);
    plan->memory = MemoryNeedOf(plan->slices, *requests_, *destination_store_);
    plan_ = std::move(plan);
  }

  RegionTask RequestTask(int32_t region, int32_t threads, int64_t memory_bytes) {
    RegionTask task = Task(region, threads, memory_bytes);
    task.source = requests_.get();
    return task;
  }

  absl::Status PrepareAllFromRequests(int32_t threads, int64_t memory_bytes) {
    for (size_t region = 0; region < plan_->slices.regions().size(); ++region) {
      const absl::Status status = PrepareRegion(
          RequestTask(static_cast<int32_t>(region), threads, memory_bytes), progress_);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  // Every part and its record, which differ from place to place in the ETag alone.
  std::map<std::string, std::string> Output() {
    std::map<std::string, std::string> output;
    for (const Region& region : plan_->slices.regions()) {
      for (const int32_t rank : plan_->slices.RanksOf(region)) {
        for (const PartPlan& part : plan_->slices.PartsOf(region, rank)) {
          const std::string key = PartKeyOf(part, rank);
          output[key] = ReadFile(plan_->target().destination_uri() + "/" + key);
          const std::string record_key = absl::StrCat(
              "_shardprep/", plan_->fingerprint, "/",
              rank == kReplicatedRank ? "replicated" : absl::StrCat(rank), "-", part.part, ".json");
          v1::PartRecord record;
          const auto text = destination_store_->Get(record_key, 1 << 20);
          EXPECT_TRUE(text.ok()) << text.status();
          if (!text.ok()) continue;
          EXPECT_TRUE(ParseStoredJson(*text, record_key, kFormatVersion, record).ok());
          record.clear_etag();
          output[record_key] = record.SerializeAsString();
        }
      }
    }
    return output;
  }

  std::unique_ptr<RequestStore> requests_;
};

TEST_F(RequestedSourceTest, LargeReadsMakeTheFilesThatBlocksMake) {
  struct Way {
    int64_t preferred_read_bytes;
    int32_t threads;
    int64_t spare;  // memory beyond the least
  };
  // Reads of whole tensors; of some rows, with the least memory; and of few rows.
  const Way ways[] = {{8 << 20, 3, 1 << 20}, {16 << 10, 1, 0}, {1, 2, 100}, {1, 8, 50'000}};
  int job = 0;
  for (const char* profile : {"aiter-separated", "aiter-interleaved", "aiter-gfx1250", "logical"}) {
    for (const int32_t ranks : {1, 8}) {
      if (ranks == 1 && std::string(profile) != "aiter-separated") continue;
      SCOPED_TRACE(::testing::Message() << profile << " T=" << ranks);
      const auto spec = [&] {
        v1::PrepJobSpec job_spec = Spec(ranks, profile, destination_ / absl::StrCat(job++));
        v1::KernelTarget& kernel = *job_spec.mutable_targets(0)->mutable_kernel_target();
        kernel.set_backend("AITER_MXFP4_BF16");
        kernel.set_architecture(std::string(profile) == "aiter-gfx1250" ? "gfx1250" : "gfx950");
        return job_spec;
      };
      Plan(spec());
      ASSERT_EQ(PrepareAll(2, Budget(ranks, 2)), absl::OkStatus());
      const std::map<std::string, std::string> want = Output();
      for (const Way& way : ways) {
        SCOPED_TRACE(::testing::Message() << "reads of " << way.preferred_read_bytes);
        PlanForRequests(spec(), way.preferred_read_bytes);
        ASSERT_EQ(PrepareAllFromRequests(way.threads, Budget(ranks, 1) + way.spare),
                  absl::OkStatus());
        const std::map<std::string, std::string> found = Output();
        ASSERT_EQ(found.size(), want.size());
        for (const auto& [key, bytes] : want) EXPECT_TRUE(found.at(key) == bytes) << key;
      }
    }
  }
}

// Two expert-parallel groups of two ranks each, which are a batch each.
class BatchesTest : public RequestedSourceTest {
 protected:
  v1::PrepJobSpec GroupSpec() {
    v1::PrepJobSpec spec = Spec(4, "aiter-separated", destination_ / absl::StrCat(job_++));
    spec.mutable_targets(0)->mutable_parallel_layout()->set_expert_parallel_size(2);
    return spec;
  }

  // What one batch after the other makes.
  std::map<std::string, std::string> Want() {
    Plan(GroupSpec());
    EXPECT_EQ(PrepareAll(1, Budget(4, 1)), absl::OkStatus());
    return Output();
  }

 private:
  int job_ = 0;
};

TEST_F(BatchesTest, SideBySideMakeTheSameFiles) {
  const std::map<std::string, std::string> want = Want();
  for (const bool requests : {false, true}) {
    for (const int32_t threads : {2, 3, 4, 9}) {
      for (const int64_t batch_threads : {0, 1, 2}) {  // 0: memory for one batch at a time
        SCOPED_TRACE(absl::StrCat(requests, ", ", threads, " threads, ", batch_threads));
        requests ? PlanForRequests(GroupSpec(), 16 << 10) : Plan(GroupSpec());
        const int64_t memory = batch_threads == 0
                                   ? Budget(4, 1)
                                   : std::max(Budget(4, 1), 2 * Budget(2, batch_threads));
        ASSERT_EQ(requests ? PrepareAllFromRequests(threads, memory) : PrepareAll(threads, memory),
                  absl::OkStatus());
        EXPECT_TRUE(Output() == want);
      }
    }
  }
}

TEST_F(BatchesTest, AllThreadsWorkAtOnce) {
  Plan(GroupSpec());
  RegionTask task = Task(0, 4, 2 * Budget(2, 2));
  MeetingShuffler shuffler(4);
  task.shuffler = &shuffler;
  EXPECT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
}

// Fails from one call on.
class FailingShuffler : public Shuffler {
 public:
  explicit FailingShuffler(int calls) : left_(calls) {}
  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t begin,
                       int64_t end, uint8_t* out) override {
    if (left_-- <= 0) return absl::UnavailableError("fell off the bus");
    return host_->Shuffle(job, views, begin, end, out);
  }
  std::string name() const override { return host_->name(); }

 private:
  const std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
  std::atomic<int> left_;
};

TEST_F(BatchesTest, AFailureOfOneEndsAllWithItsErrorAndIsMadeUpFor) {
  const std::map<std::string, std::string> want = Want();
  for (const int calls : {0, 1, 7, 12}) {
    for (const int32_t threads : {1, 4}) {
      SCOPED_TRACE(absl::StrCat(calls, " calls, ", threads, " threads"));
      Plan(GroupSpec());
      RegionTask task = Task(0, threads, 2 * Budget(2, 2));
      FailingShuffler shuffler(calls);
      task.shuffler = &shuffler;
      EXPECT_EQ(PrepareRegion(task, progress_), absl::UnavailableError("fell off the bus"));
      ASSERT_EQ(PrepareAll(threads, 2 * Budget(2, 2)), absl::OkStatus());
      EXPECT_TRUE(Output() == want);
    }
  }
}

// Holds the first call until another has come to its end, and does not do the others' work.
class HoldingShuffler : public Shuffler {
 public:
  explicit HoldingShuffler(std::function<absl::Status()> others) : others_(std::move(others)) {}
  absl::Status Shuffle(const ShuffleJob& job, absl::Span<const RowsView> views, int64_t begin,
                       int64_t end, uint8_t* out) override {
    if (first_.exchange(false)) {
      other_came_.WaitForNotification();
      absl::SleepFor(absl::Milliseconds(20));  // until the other has said how it ended
      return host_->Shuffle(job, views, begin, end, out);
    }
    const absl::Status status = others_();
    if (!other_came_.HasBeenNotified()) other_came_.Notify();
    return status;
  }
  std::string name() const override { return host_->name(); }

 private:
  const std::unique_ptr<Shuffler> host_ = MakeHostShuffler();
  const std::function<absl::Status()> others_;
  std::atomic<bool> first_{true};
  absl::Notification other_came_;
};

TEST_F(BatchesTest, TheErrorIsThatOfTheBatchThatFailedAndNotOfThoseThatItEnded) {
  for (int round = 0; round < 4; ++round) {
    Plan(GroupSpec());
    RegionTask task = Task(0, 2, 2 * Budget(2, 2));
    task.ranks = {0, 2};  // one of each group, so a thread for each batch
    HoldingShuffler shuffler([] { return absl::UnavailableError("fell off the bus"); });
    task.shuffler = &shuffler;
    EXPECT_EQ(PrepareRegion(task, progress_), absl::UnavailableError("fell off the bus"));
    EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
  }
}

TEST_F(BatchesTest, StopEndsAllThatAreUnderWay) {
  Plan(GroupSpec());
  RegionTask task = Task(0, 2, 2 * Budget(2, 2));
  task.ranks = {0, 2};
  std::atomic<bool> stop{false};
  task.stop = &stop;
  HoldingShuffler shuffler([&stop] {
    stop = true;
    return absl::OkStatus();
  });
  task.shuffler = &shuffler;
  EXPECT_EQ(PrepareRegion(task, progress_).code(), absl::StatusCode::kCancelled);
  EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
}

TEST_F(RequestedSourceTest, SomeRanksOfASetMakeTheirFiles) {
  Plan(Spec(8, "aiter-interleaved", destination_ / "blocks"));
  ASSERT_EQ(PrepareAll(2, Budget(8, 2)), absl::OkStatus());
  const std::map<std::string, std::string> want = Output();
  PlanForRequests(Spec(8, "aiter-interleaved", destination_ / "spans"), 20'000);
  for (const std::vector<int32_t>& ranks :
       {std::vector<int32_t>{6}, std::vector<int32_t>{0, 1, 4}, std::vector<int32_t>{2, 3, 5, 7}}) {
    for (int32_t region = 0; region < 2; ++region) {
      RegionTask task = RequestTask(region, 3, Budget(8, 1));
      task.ranks = ranks;
      ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
    }
  }
  for (size_t region = 2; region < plan_->slices.regions().size(); ++region) {
    ASSERT_EQ(PrepareRegion(RequestTask(static_cast<int32_t>(region), 1, Budget(1, 1)), progress_),
              absl::OkStatus());
  }
  EXPECT_TRUE(Output() == want);
}

// With room for whole tensors there is one request for each source tensor at most, whatever the
// number of ranks, and no byte is requested twice.
TEST_F(RequestedSourceTest, EachSourceByteIsRequestedOnceInWholeTensors) {
  for (const char* profile : {"aiter-separated", "aiter-interleaved"}) {
    SCOPED_TRACE(profile);
    PlanForRequests(Spec(8, profile, destination_ / profile), 8 << 20);
    ASSERT_EQ(PrepareAllFromRequests(3, plan_->memory.Most(8, 3)), absl::OkStatus());
    int64_t bytes = 0;
    for (const RequestStore::Request& request : requests_->Reads()) bytes += request.size_bytes;
    EXPECT_EQ(bytes, plan_->slices.NeededSourceBytes());
    EXPECT_LE(static_cast<int64_t>(requests_->Reads().size()),
              plan_->slices.checkpoint().tensors().size());
  }
  EXPECT_EQ(progress_.bytes_read, 2 * plan_->slices.NeededSourceBytes());
}

// Tensors that each rank has in its own files, sliced and whole, by blocks and by spans.
TEST_F(RequestedSourceTest, LargeReadsMakeTheDenseFilesThatBlocksMake) {
  ASSERT_TRUE(WriteTestCheckpoint(source_.path(), SmallV4Spec()).ok());
  int job = 0;
  const auto spec = [&] {
    v1::PrepJobSpec job_spec = Spec(4, "aiter-separated", destination_ / absl::StrCat(job++));
    job_spec.set_slice_dense(true);
    job_spec.set_self_contained(true);
    return job_spec;
  };
  Plan(spec());
  ASSERT_EQ(PrepareAll(3, Budget(4, 3)), absl::OkStatus());
  EXPECT_EQ(progress_.bytes_read, plan_->slices.NeededSourceBytes());
  const std::map<std::string, std::string> want = Output();
  for (const int64_t preferred : {int64_t{8} << 20, int64_t{5'000}, int64_t{1}}) {
    SCOPED_TRACE(preferred);
    PlanForRequests(spec(), preferred);
    ASSERT_EQ(PrepareAllFromRequests(3, Budget(4, 3)), absl::OkStatus());
    EXPECT_TRUE(Output() == want);
  }
  // Ranks one at a time.
  Plan(spec());
  for (size_t region = 0; region < plan_->slices.regions().size(); ++region) {
    for (const int32_t rank : plan_->slices.RanksOf(plan_->slices.regions()[region])) {
      RegionTask task = Task(static_cast<int32_t>(region), 1, Budget(1, 1));
      task.ranks = {rank};
      ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
    }
  }
  EXPECT_TRUE(Output() == want);
}

// With the least memory, requests for weights are at least half as large as preferred, or as half
// a tensor.
TEST_F(RequestedSourceTest, LittleMemoryStillMeansLargeRequests) {
  const int64_t weight_bytes = kIntermediate * kHidden / 2;
  for (const int64_t preferred : {int64_t{16} << 10, int64_t{40'000}, weight_bytes}) {
    SCOPED_TRACE(preferred);
    PlanForRequests(Spec(8, "aiter-separated", destination_ / absl::StrCat(preferred)), preferred);
    ASSERT_EQ(PrepareRegion(RequestTask(0, 2, Budget(8, 1)), progress_), absl::OkStatus());
    const Checkpoint& checkpoint = plan_->slices.checkpoint();
    int64_t bytes = 0, count = 0;
    for (int64_t t = 0; t < checkpoint.tensors().size(); ++t) {
      const TensorInfo tensor = checkpoint.tensors().at(t);
      if (tensor.size_bytes != weight_bytes) continue;
      for (const RequestStore::Request& request : requests_->Reads()) {
        if (request.key != checkpoint.files()[tensor.file].name) continue;
        if (request.offset < tensor.offset || request.offset >= tensor.offset + weight_bytes) {
          continue;
        }
        bytes += request.size_bytes;
        ++count;
      }
    }
    ASSERT_GT(count, 0);
    EXPECT_GE(bytes / count, preferred / 2);
  }
}

TEST_F(RequestedSourceTest, TheFirstFailedRequestEndsTheRegionAndLeavesNoPart) {
  for (const int32_t threads : {1, 3}) {
    for (const int failing : {0, 1, 7, 17}) {
      SCOPED_TRACE(::testing::Message() << "request " << failing << ", threads " << threads);
      PlanForRequests(
          Spec(4, "aiter-separated", destination_ / absl::StrCat(threads, "-", failing)), 1);
      std::atomic<int> requests{0};
      requests_->before_read = [&](const RequestStore::Request&) {
        return requests++ == failing ? absl::UnavailableError("503") : absl::OkStatus();
      };
      EXPECT_EQ(PrepareRegion(RequestTask(0, threads, Budget(4, 1)), progress_),
                absl::UnavailableError("503"));
      EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
    }
  }
}

TEST_F(RequestedSourceTest, StopEndsTheRegionWhenTheRequestUnderWayEnds) {
  PlanForRequests(Spec(4, "aiter-separated", destination_ / "out"), 1);
  absl::Notification asked, answer;
  std::atomic<bool> first{true};
  std::atomic<int> requests{0};
  requests_->before_read = [&](const RequestStore::Request&) {
    ++requests;
    if (first.exchange(false)) asked.Notify();
    answer.WaitForNotification();
    return absl::OkStatus();
  };
  std::atomic<bool> stop{false};
  RegionTask task = RequestTask(0, 2, Budget(4, 1));
  task.stop = &stop;
  absl::Status status;
  std::thread region([&] { status = PrepareRegion(task, progress_); });
  asked.WaitForNotification();
  stop = true;
  answer.Notify();
  region.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
  EXPECT_LE(requests, kSourceReaders);
  EXPECT_THAT(destination_store_->List("").value(), ::testing::IsEmpty());
}

// A store that answers only when many requests are waiting: reading one at a time would hang.
TEST_F(RequestedSourceTest, SeveralRequestsAreUnderWayAtOnce) {
  // Too little for two weights to share a request.
  PlanForRequests(Spec(2, "aiter-separated", destination_ / "out"), 40'000);
  constexpr int kTogether = 6;  // gate and up of three experts
  std::atomic<int> asked{0};
  absl::Notification together;
  requests_->before_read = [&](const RequestStore::Request&) {
    if (++asked == kTogether) together.Notify();
    together.WaitForNotification();
    return absl::OkStatus();
  };
  ASSERT_EQ(PrepareRegion(RequestTask(0, 1, plan_->memory.Most(2, 1)), progress_),
            absl::OkStatus());
}

TEST_F(RequestedSourceTest, ADestinationOfRequestsEndsItsPartsTogether) {
  Plan(Spec(4, "aiter-separated", destination_ / "out"));
  RequestStore destination(destination_store_.get(), 8 << 20);
  RegionTask task = Task(0, 1, Budget(4, 1));
  task.destination = &destination;
  // One thread owns four ranks; each asks before its part and before its record.
  std::atomic<int> asked{0};
  absl::Notification together;
  task.gate = [&]() -> absl::Status {
    if (++asked == 4) together.Notify();
    together.WaitForNotification();
    return absl::OkStatus();
  };
  ASSERT_EQ(PrepareRegion(task, progress_), absl::OkStatus());
  for (int32_t rank = 0; rank < 4; ++rank) {
    CheckPart(plan_->slices.regions()[0], plan_->slices.regions()[0].parts[0], rank);
  }
}

}  // namespace
}  // namespace shardprep
