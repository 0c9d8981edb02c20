// Several targets from one reading of the source: each gets, byte for byte, the artefact that a job
// of its own makes, and each source byte is read once for all of them.
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/shuffle.h"
#include "tests/support/temp_dir.h"
#include "tests/support/test_checkpoint.h"
#include "workers/artifact.h"
#include "workers/joint_prep.h"
#include "workers/joint_spans.h"
#include "workers/open_store.h"
#include "workers/region_prep.h"
#include "workers/target_set.h"

namespace shardprep {
namespace {

using ::testing::HasSubstr;

// One target of a case.
struct Shape {
  int32_t tp = 1, dp = 1, ep = 1;
  const char* profile = "aiter-separated";
  const char* naming = "vllm";
  const char* placement = "";
  int32_t redundant = 0;
  std::vector<int32_t> map;  // physical to logical
  const char* architecture = "gfx950";
};

struct Case {
  const char* name;
  CheckpointSpec checkpoint;
  std::vector<Shape> shapes;
  bool slice_dense = false;
  bool self_contained = false;
  // 1 unless copies of an expert are read again.
  bool reads_once = true;
};

CheckpointSpec Small(TestFamily family, int64_t intermediate, int64_t experts = 8) {
  CheckpointSpec spec = FamilySpec(family);
  spec.hidden = 256;
  spec.intermediate = intermediate;
  spec.experts = experts;
  return spec;
}

std::vector<Case> Cases() {
  return {
      {"TensorParallelSizes",
       Small(TestFamily::kDeepSeekV4, 512),
       {{.tp = 8}, {.tp = 4}, {.tp = 2, .naming = "sglang"}}},
      {"SeparatedAndInterleavedAndExpertParallel",
       Small(TestFamily::kDeepSeekV4, 512),
       {{.tp = 8}, {.tp = 4}, {.tp = 8, .ep = 8, .profile = "aiter-interleaved"}}},
      {"EveryProfile",
       Small(TestFamily::kDeepSeekV4, 512),
       {{.tp = 4},
        {.tp = 2, .profile = "aiter-interleaved"},
        {.tp = 4, .profile = "aiter-gfx1250", .architecture = "gfx1250"},
        {.tp = 2, .profile = "logical"}}},
      {"ExpertParallelOnly",
       Small(TestFamily::kDeepSeekV4, 256, 12),
       {{.tp = 4, .ep = 4},
        {.tp = 3, .ep = 3, .placement = "round-robin"},
        {.tp = 2, .dp = 2, .ep = 2, .profile = "aiter-interleaved"}}},
      {"CopiesOfExperts",
       Small(TestFamily::kDeepSeekV4, 256),
       {{.tp = 4, .ep = 4, .redundant = 4}}},
      {"RedundantExperts",
       Small(TestFamily::kDeepSeekV4, 256),
       {{.tp = 4}, {.tp = 4, .ep = 4, .redundant = 4}},
       false,
       false,
       false},
      {"MapsThatContradictEachOther",
       Small(TestFamily::kDeepSeekV4, 256, 4),
       {{.tp = 2, .ep = 2, .map = {3, 1, 2, 0}},
        {.tp = 2, .ep = 2, .map = {1, 3, 0, 2}},
        {.tp = 2, .ep = 2, .map = {0, 0, 1, 2, 3, 3}}},
       false,
       false,
       false},
      {"Fp8Blocks",
       Small(TestFamily::kDeepSeekV3Fp8, 1024),
       {{.tp = 4}, {.tp = 2}, {.tp = 2, .ep = 2}}},
      {"Fp8E8m0Blocks", Small(TestFamily::kDeepSeekV4Fp8, 1024), {{.tp = 4}, {.tp = 8, .ep = 2}}},
      {"Quark",
       Small(TestFamily::kDeepSeekV3Quark, 512),
       {{.tp = 4}, {.tp = 2}, {.tp = 8, .ep = 4}}},
      {"Kimi", Small(TestFamily::kKimiK3, 512), {{.tp = 4}, {.tp = 2, .ep = 2}}},
      {"Mixtral", Small(TestFamily::kMixtral, 512), {{.tp = 4}, {.tp = 2}, {.tp = 4, .ep = 4}}},
      {"Qwen3", Small(TestFamily::kQwen3Bf16, 512), {{.tp = 4, .profile = "logical"}, {.tp = 8}}},
      // Rows of gate and up alternate in the source, and the last rank has less.
      {"GptOss",
       Small(TestFamily::kGptOss, 320),
       {{.tp = 4, .profile = "aiter-interleaved"},
        {.tp = 2, .profile = "logical"},
        {.tp = 4, .ep = 2, .profile = "aiter-interleaved"},
        {.tp = 8, .ep = 8, .profile = "logical"}}},
      {"SelfContained",
       Small(TestFamily::kDeepSeekV4, 256),
       {{.tp = 4}, {.tp = 2, .dp = 2, .ep = 4}},
       false,
       true},
      {"SlicedDenseTensors", SmallV4Spec(), {{.tp = 4}, {.tp = 2}, {.tp = 1}}, true},
      {"SlicedDenseTensorsSelfContained",
       SmallV4Spec(),
       {{.tp = 2, .dp = 2, .ep = 2}, {.tp = 4}},
       true,
       true},
  };
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::vector<std::string> Keys(ObjectStore& store) {
  const auto entries = store.List("");
  EXPECT_TRUE(entries.ok()) << entries.status();
  std::vector<std::string> keys;
  for (const ObjectEntry& entry : entries.value()) keys.push_back(entry.key);
  return keys;
}

class JointTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), GetParam().checkpoint).ok());
    auto source = OpenStore(source_.path(), {});
    ASSERT_TRUE(source.ok()) << source.status();
    source_store_ = std::move(*source);
  }

  v1::PrepJobSpec Spec(const std::vector<Shape>& shapes, const std::string& under) const {
    v1::PrepJobSpec spec;
    spec.set_source_uri(source_.path());
    spec.set_include_mtp(true);
    spec.set_slice_dense(GetParam().slice_dense);
    spec.set_self_contained(GetParam().self_contained);
    spec.set_part_size_bytes(192 << 10);  // several parts a region, and not at the same tensors
    int number = 0;
    for (const Shape& shape : shapes) {
      v1::Target& target = *spec.add_targets();
      v1::ParallelLayout& parallel = *target.mutable_parallel_layout();
      parallel.set_tensor_parallel_size(shape.tp);
      parallel.set_data_parallel_size(shape.dp);
      parallel.set_expert_parallel_size(shape.ep);
      parallel.set_expert_placement(shape.placement);
      parallel.set_redundant_experts(shape.redundant);
      parallel.mutable_physical_to_logical()->Assign(shape.map.begin(), shape.map.end());
      target.mutable_kernel_target()->set_profile(shape.profile);
      target.mutable_kernel_target()->set_architecture(shape.architecture);
      if (shape.architecture == std::string("gfx1250")) {
        target.mutable_kernel_target()->set_backend("AITER_MXFP4_BF16");
      }
      target.set_naming(shape.naming);
      target.set_destination_uri(destination_ / absl::StrCat(under, number++));
    }
    return spec;
  }

  std::unique_ptr<ObjectStore> Destination(const JobPlan& plan) {
    auto store = OpenStore(plan.target().destination_uri(), {.create = true});
    EXPECT_TRUE(store.ok()) << store.status();
    return std::move(*store);
  }

  // The plans of all targets in one job. The spec of each says where it goes.
  void Plan(const std::string& under, int64_t budget = int64_t{512} << 20) {
    auto set = PlanTargets(Spec(GetParam().shapes, under), {.memory_budget_bytes = budget});
    ASSERT_TRUE(set.ok()) << set.status();
    set_ = *set;
    destinations_.clear();
    for (const auto& plan : set_->plans()) destinations_.push_back(Destination(*plan));
  }

  // The given ranks of a region, by number.
  absl::Status PrepareSet(int32_t region, const std::vector<int32_t>& numbers, int32_t threads,
                          const std::atomic<bool>* stop = nullptr) {
    std::map<int32_t, std::vector<int32_t>> by_target;
    for (const int32_t number : numbers) {
      const TargetRank rank = *set_->RankOf(number);
      EXPECT_EQ(set_->NumberOf(rank), number);
      by_target[rank.target].push_back(rank.rank);
    }
    JointTask task;
    for (const auto& [target, ranks] : by_target) {
      task.targets.push_back({&set_->plan(target), destinations_[static_cast<size_t>(target)].get(),
                              ranks, [this, region, t = target](int32_t rank) {
                                const absl::MutexLock lock(&mu_);
                                EXPECT_TRUE(
                                    done_.insert({region, set_->NumberOf({t, rank})}).second);
                              }});
    }
    task.region = region;
    task.source = source_store_.get();
    task.shuffler = shuffler_.get();
    task.threads = threads;
    task.need = &set_->joint_memory();
    memory_.assign(static_cast<size_t>(
                       set_->joint_memory().Total(static_cast<int64_t>(numbers.size()), threads)),
                   0xEE);  // what a block does not fill must not show
    task.memory = absl::MakeSpan(memory_);
    task.stop = stop;
    return PrepareJointly(task, progress_);
  }

  // Every region, in sets of at most `per_set` ranks.
  void PrepareAll(int32_t threads, size_t per_set) {
    for (int32_t region = 0; region < set_->region_count(); ++region) {
      const std::vector<int32_t> numbers = set_->RanksOf(region);
      for (size_t begin = 0; begin < numbers.size(); begin += per_set) {
        const size_t end = std::min(begin + per_set, numbers.size());
        const std::vector<int32_t> some(numbers.begin() + static_cast<std::ptrdiff_t>(begin),
                                        numbers.begin() + static_cast<std::ptrdiff_t>(end));
        ASSERT_EQ(PrepareSet(region, some, threads), absl::OkStatus());
      }
      for (const int32_t number : numbers) EXPECT_EQ(done_.count({region, number}), 1) << number;
    }
  }

  // A job of its own for each target.
  void MakeOwn() {
    for (size_t t = 0; t < GetParam().shapes.size(); ++t) {
      auto plan = PlanJob(Spec({GetParam().shapes[t]}, absl::StrCat("own", t, "-")), {});
      ASSERT_TRUE(plan.ok()) << plan.status();
      const std::unique_ptr<ObjectStore> destination = Destination(**plan);
      const SlicePlan& slices = (*plan)->slices;
      for (int32_t region = 0; region < static_cast<int32_t>(slices.regions().size()); ++region) {
        RegionTask task;
        task.plan = plan->get();
        task.region = region;
        task.ranks = slices.RanksOf(slices.regions()[static_cast<size_t>(region)]);
        task.source = source_store_.get();
        task.destination = destination.get();
        task.shuffler = shuffler_.get();
        std::vector<uint8_t> memory(
            static_cast<size_t>((*plan)->memory.Total(slices.rank_count(), 1)), 0xEE);
        task.memory = absl::MakeSpan(memory);
        RegionProgress progress;
        ASSERT_EQ(PrepareRegion(task, progress), absl::OkStatus());
      }
      Commit(**plan, *destination);
    }
  }

  void Commit(const JobPlan& plan, ObjectStore& destination) {
    const auto committed = CommitArtifact(plan, *source_store_, destination);
    ASSERT_TRUE(committed.ok()) << committed.status();
    ASSERT_EQ(RemoveJournal(destination), absl::OkStatus());
  }

  // Commits every target and holds all of its files against those of its own job.
  void CheckAgainstOwn(const std::string& under) {
    for (int32_t t = 0; t < set_->target_count(); ++t) {
      SCOPED_TRACE(absl::StrCat("target ", t));
      ObjectStore& joint = *destinations_[static_cast<size_t>(t)];
      Commit(set_->plan(t), joint);
      const std::string own_path = destination_ / absl::StrCat("own", t, "-0");
      const std::string joint_path = destination_ / absl::StrCat(under, t);
      auto own = OpenStore(own_path, {});
      ASSERT_TRUE(own.ok());
      const std::vector<std::string> own_keys = Keys(**own);
      EXPECT_GT(own_keys.size(), 4U);
      EXPECT_EQ(Keys(joint), own_keys);
      for (const std::string& key : own_keys) {
        const std::string expected = ReadFile(absl::StrCat(own_path, "/", key));
        EXPECT_FALSE(expected.empty()) << key;
        EXPECT_TRUE(ReadFile(absl::StrCat(joint_path, "/", key)) == expected) << key << " differs";
      }
    }
  }

  // What was read and written is what the plan said.
  template <typename Summary>
  void CheckFigures(const Summary& plan) {
    EXPECT_EQ(plan.ranks_per_lease(), set_->RanksPerLease(int64_t{512} << 20).value());
    EXPECT_EQ(progress_.bytes_read, plan.read_bytes());
    EXPECT_EQ(progress_.bytes_written, plan.output_bytes());
    if (GetParam().reads_once) {
      EXPECT_EQ(plan.read_bytes(), plan.needed_bytes());
    } else {
      EXPECT_GE(plan.read_bytes(), plan.needed_bytes());
    }
  }

  TempDir source_;
  TempDir destination_;
  std::unique_ptr<ObjectStore> source_store_;
  std::vector<std::unique_ptr<ObjectStore>> destinations_;
  std::shared_ptr<const TargetSet> set_;
  const std::unique_ptr<Shuffler> shuffler_ = MakeHostShuffler();
  std::vector<uint8_t> memory_;
  RegionProgress progress_;
  absl::Mutex mu_;
  std::set<std::pair<int32_t, int32_t>> done_;
};

TEST_P(JointTest, EachTargetGetsTheBytesOfItsOwnJobAndTheSourceIsReadOnce) {
  ASSERT_NO_FATAL_FAILURE(MakeOwn());
  ASSERT_NO_FATAL_FAILURE(Plan("joint"));
  EXPECT_EQ(set_->summary().other_targets_size(), set_->target_count() - 1);
  ASSERT_NO_FATAL_FAILURE(PrepareAll(/*threads=*/3, /*per_set=*/1000));
  if (set_->target_count() == 1) {
    CheckFigures(set_->summary());
  } else {
    CheckFigures(set_->summary().joint());
  }
  CheckAgainstOwn("joint");
}

// Cases that differ in how ranks share the source.
using JointSetTest = JointTest;
std::vector<Case> SetCases() {
  std::vector<Case> cases;
  for (const Case& one : Cases()) {
    const std::set<std::string> names = {"SeparatedAndInterleavedAndExpertParallel",
                                         "MapsThatContradictEachOther", "GptOss",
                                         "SlicedDenseTensorsSelfContained"};
    if (names.count(one.name) != 0) cases.push_back(one);
  }
  return cases;
}

// Leases that a budget makes smaller: some ranks of a target with some of the next.
TEST_P(JointSetTest, SmallerSetsMakeTheSameBytes) {
  ASSERT_NO_FATAL_FAILURE(MakeOwn());
  for (const size_t per_set : {1, 3}) {
    SCOPED_TRACE(per_set);
    const std::string under = absl::StrCat("set", per_set, "-");
    ASSERT_NO_FATAL_FAILURE(Plan(under));
    done_.clear();
    ASSERT_NO_FATAL_FAILURE(PrepareAll(/*threads=*/1, per_set));
    CheckAgainstOwn(under);
  }
}

// What a run that was stopped recorded is kept, and only the rest is made.
TEST_P(JointSetTest, ResumesWithThePartsThatAreNotRecorded) {
  ASSERT_NO_FATAL_FAILURE(MakeOwn());
  ASSERT_NO_FATAL_FAILURE(Plan("joint"));
  const std::vector<int32_t> numbers = set_->RanksOf(0);
  // Every second rank, and then the rest with it.
  std::vector<int32_t> some;
  for (size_t n = 0; n < numbers.size(); n += 2) some.push_back(numbers[n]);
  ASSERT_EQ(PrepareSet(0, some, 2), absl::OkStatus());
  const int64_t written = progress_.bytes_written;
  done_.clear();
  ASSERT_NO_FATAL_FAILURE(PrepareAll(2, 1000));
  EXPECT_EQ(progress_.bytes_written, set_->summary().joint().output_bytes())
      << written << " of them before";
  CheckAgainstOwn("joint");
}

INSTANTIATE_TEST_SUITE_P(All, JointTest, ::testing::ValuesIn(Cases()),
                         [](const auto& test) { return test.param.name; });

INSTANTIATE_TEST_SUITE_P(Some, JointSetTest, ::testing::ValuesIn(SetCases()),
                         [](const auto& test) { return test.param.name; });

// A part that is missing in the middle of a rank's parts.
using JointPartsTest = JointTest;
TEST_P(JointPartsTest, MakesTheOnePartThatHasNoRecord) {
  ASSERT_NO_FATAL_FAILURE(MakeOwn());
  ASSERT_NO_FATAL_FAILURE(Plan("joint"));
  ASSERT_NO_FATAL_FAILURE(PrepareAll(2, 1000));
  const SlicePlan& slices = set_->plan(1).slices;
  const std::vector<PartPlan>& parts = slices.PartsOf(slices.regions()[0], 1);
  ASSERT_GT(parts.size(), 1U);
  const std::string key = PartKeyOf(parts[0], 1);
  ASSERT_EQ(destinations_[1]->Delete(key), absl::OkStatus());
  done_.clear();
  const int64_t before = progress_.bytes_written;
  ASSERT_EQ(PrepareSet(0, set_->RanksOf(0), 2), absl::OkStatus());
  const auto size = static_cast<int64_t>(ReadFile(destination_ / ("joint1/" + key)).size());
  EXPECT_EQ(progress_.bytes_written - before, size);
  CheckAgainstOwn("joint");
}

TEST_P(JointPartsTest, ADestinationThatRefusesEndsAllAndNamesItself) {
  ASSERT_NO_FATAL_FAILURE(Plan("joint"));
  // Another job's manifest: nothing is written over it.
  std::filesystem::create_directories(destination_ / "joint1");
  std::ofstream(destination_ / "joint1/manifest.json") << "{}";
  const absl::Status status = PrepareSet(0, set_->RanksOf(0), 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("joint1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("another job has committed"));
}

TEST_P(JointPartsTest, StopEndsTheWorkAndLeavesNoPart) {
  ASSERT_NO_FATAL_FAILURE(Plan("joint"));
  const std::atomic<bool> stop{true};
  const absl::Status status = PrepareSet(0, set_->RanksOf(0), 2, &stop);
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
  EXPECT_TRUE(done_.empty());
  for (const auto& destination : destinations_) {
    EXPECT_THAT(Keys(*destination), ::testing::IsEmpty());
  }
}

INSTANTIATE_TEST_SUITE_P(Two, JointPartsTest, ::testing::Values(Cases()[0]),
                         [](const auto& test) { return test.param.name; });

// Extents of the published V4-Pro; headers only.
class JointSpansTest : public ::testing::Test {
 protected:
  static constexpr int64_t kSpanBytes = int64_t{1} << 20;
  static constexpr int64_t kHidden = 7168, kIntermediate = 3072;
  static constexpr int64_t kHalfBytes = kIntermediate * kHidden / 2;  // of gate, or up

  void SetUp() override {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), {.hidden = kHidden,
                                                     .intermediate = kIntermediate,
                                                     .experts = 8,
                                                     .layers = 1,
                                                     .mtp_layers = 0,
                                                     .sparse = true})
                    .ok());
  }

  void AddTarget(int32_t tp, int32_t ep, const std::string& profile) {
    v1::Target& target = *spec_.add_targets();
    target.mutable_parallel_layout()->set_tensor_parallel_size(tp);
    target.mutable_parallel_layout()->set_expert_parallel_size(ep);
    target.mutable_kernel_target()->set_profile(profile);
    target.set_destination_uri(destination_ / absl::StrCat(spec_.targets_size()));
  }

  // The spans of the routed region for all ranks, after what holds for any was checked.
  JointSpans Plan() {
    spec_.set_source_uri(source_.path());
    set_ = PlanTargets(spec_, {}).value();
    std::vector<JointRank> ranks;
    for (const int32_t number : set_->RanksOf(0)) {
      const TargetRank rank = set_->RankOf(number).value();
      ranks.push_back({&set_->plan(rank.target).slices, rank.rank, std::vector<bool>(4, true)});
    }
    JointSpans spans = PlanJointSpans(0, ranks, kSpanBytes);
    for (size_t r = 0; r < ranks.size(); ++r) CheckOrder(ranks[r], spans.shares[r]);
    int64_t bytes = 0;
    for (const SourceSpan& span : spans.spans) bytes += span.size_bytes;
    EXPECT_EQ(bytes, set_->plan(0).slices.regions()[0].source_bytes);
    return spans;
  }

  // A rank meets every row of its output once, in order, in spans that rise.
  static void CheckOrder(const JointRank& rank, const std::vector<JointShare>& shares) {
    int32_t tensor = 0;
    int64_t slot = 0, row = 0, span = 0;
    for (const JointShare& share : shares) {
      const FusedTensor& fused =
          rank.plan->FusedTensorsOf(rank.rank)[static_cast<size_t>(share.tensor)];
      EXPECT_EQ(std::tie(share.tensor, share.slot, share.begin), std::tie(tensor, slot, row));
      EXPECT_EQ(share.begin % 32, 0);
      EXPECT_GE(share.span, span);
      EXPECT_EQ(share.ends_slot, share.end == fused.job.rows);
      EXPECT_EQ(share.ends_tensor, share.ends_slot && slot + 1 == fused.experts);
      row = share.ends_slot ? 0 : share.end;
      slot = share.ends_tensor ? 0 : slot + (share.ends_slot ? 1 : 0);
      tensor += share.ends_tensor ? 1 : 0;
      span = share.span;
    }
    EXPECT_EQ(tensor, 4);
  }

  static int64_t Largest(const JointSpans& spans) {
    int64_t bytes = 0;
    for (const SourceSpan& span : spans.spans) bytes = std::max(bytes, span.size_bytes);
    return bytes;
  }

  TempDir source_;
  TempDir destination_;
  v1::PrepJobSpec spec_;
  std::shared_ptr<const TargetSet> set_;
};

TEST_F(JointSpansTest, PiecesAreAsSmallAsAskedForWhereAllRanksWantGateBeforeUp) {
  AddTarget(8, 1, "aiter-separated");
  AddTarget(4, 1, "aiter-separated");
  AddTarget(8, 8, "aiter-separated");
  EXPECT_LE(Largest(Plan()), kSpanBytes);
}

TEST_F(JointSpansTest, PiecesAreAsSmallAsAskedForWhereAllRanksAlternate) {
  AddTarget(8, 1, "aiter-interleaved");
  AddTarget(8, 8, "aiter-interleaved");
  EXPECT_LE(Largest(Plan()), kSpanBytes);
}

// While others alternate, such a rank needs its gate rows and its up rows in one piece.
TEST_F(JointSpansTest, APieceEndsWhereRanksEndThatWantGateBeforeUp) {
  AddTarget(8, 1, "aiter-separated");
  AddTarget(8, 8, "aiter-interleaved");
  EXPECT_EQ(Largest(Plan()), 2 * kHalfBytes / 8);
}

TEST_F(JointSpansTest, AnExpertThatOneRankWantsGateBeforeUpIsOnePieceBesideOthersThatAlternate) {
  AddTarget(8, 1, "aiter-interleaved");
  AddTarget(8, 8, "aiter-separated");
  EXPECT_EQ(Largest(Plan()), 2 * kHalfBytes);
  // Which is what a worker must have room for, twice.
  EXPECT_EQ(set_->joint_memory().read_ahead_least, 4 * kHalfBytes);
}

// Without an order that other ranks force, groups advance side by side, so threads share the work.
TEST_F(JointSpansTest, GroupsOfExpertParallelismAdvanceTogether) {
  AddTarget(2, 2, "aiter-separated");
  AddTarget(2, 2, "aiter-interleaved");
  const JointSpans spans = Plan();
  for (const std::vector<JointShare>& shares : spans.shares) {
    const auto second = std::find_if(shares.begin(), shares.end(),
                                     [](const JointShare& share) { return share.slot == 1; });
    ASSERT_NE(second, shares.end());
    for (const std::vector<JointShare>& others : spans.shares) {
      EXPECT_LT(others.front().span, second->span) << "the first expert of every group comes first";
    }
  }
}

class TargetSetTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(WriteTestCheckpoint(source_.path(), Small(TestFamily::kDeepSeekV4, 512)).ok());
    spec_.set_source_uri(source_.path());
    for (const int32_t tp : {4, 2}) {
      v1::Target& target = *spec_.add_targets();
      target.mutable_parallel_layout()->set_tensor_parallel_size(tp);
      target.set_destination_uri(destination_ / absl::StrCat("tp", tp));
    }
  }

  TempDir source_;
  TempDir destination_;
  v1::PrepJobSpec spec_;
};

TEST_F(TargetSetTest, NumbersRanksThroughOverTheTargets) {
  const auto set = PlanTargets(spec_, {});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_EQ((*set)->RanksOf(0), (std::vector<int32_t>{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ((*set)->NumberOf({1, 0}), 4);
  EXPECT_EQ((*set)->RankOf(5).value(), (TargetRank{1, 1}));
  EXPECT_EQ((*set)->RankOf(-2).value(), (TargetRank{1, kReplicatedRank}));
  for (const int32_t number : {6, -3}) {
    EXPECT_EQ((*set)->RankOf(number).status().code(), absl::StatusCode::kInvalidArgument);
  }
  const int32_t last = (*set)->region_count() - 1;
  EXPECT_EQ((*set)->RanksOf(last), (std::vector<int32_t>{-1, -2}));
}

// A job is another one when any of its targets is, or their order.
TEST_F(TargetSetTest, FingerprintIsThatOfTheOnlyTargetOrOfAllInOrder) {
  const auto both = PlanTargets(spec_, {});
  ASSERT_TRUE(both.ok());
  v1::PrepJobSpec turned = spec_;
  turned.mutable_targets()->SwapElements(0, 1);
  const auto other = PlanTargets(turned, {});
  ASSERT_TRUE(other.ok());
  EXPECT_NE((*both)->fingerprint(), (*other)->fingerprint());
  EXPECT_EQ((*both)->plan(0).fingerprint, (*other)->plan(1).fingerprint);
  v1::PrepJobSpec one = spec_;
  one.mutable_targets()->RemoveLast();
  const auto single = PlanTargets(one, {});
  ASSERT_TRUE(single.ok());
  EXPECT_EQ((*single)->fingerprint(), (*both)->plan(0).fingerprint);
  EXPECT_FALSE((*single)->summary().has_joint());
}

TEST_F(TargetSetTest, ASmallBudgetMeansSmallerLeasesAndMoreReading) {
  const auto set = PlanTargets(spec_, {});
  ASSERT_TRUE(set.ok());
  const v1::JointPlan& joint = (*set)->summary().joint();
  EXPECT_EQ(joint.ranks_per_lease(), 6);
  EXPECT_EQ((*set)->RanksPerLease(joint.read_once_memory_budget_bytes()).value(), 6);
  EXPECT_LT((*set)->RanksPerLease(joint.read_once_memory_budget_bytes() - 1).value(), 6);
  EXPECT_GE((*set)->RanksPerLease(joint.minimum_memory_budget_bytes()).value(), 1);
  const auto too_small = (*set)->RanksPerLease(joint.minimum_memory_budget_bytes() - 1);
  EXPECT_EQ(too_small.status().code(), absl::StatusCode::kInvalidArgument);
  const auto tight =
      PlanTargets(spec_, {.memory_budget_bytes = joint.read_once_memory_budget_bytes() - 1});
  ASSERT_TRUE(tight.ok());
  EXPECT_GT((*tight)->summary().joint().read_amplification(), 1.0);
  EXPECT_DOUBLE_EQ(joint.read_amplification(), 1.0);
}

// A copy is no reason to read an expert again, however far apart the slots are.
TEST_F(TargetSetTest, CopiesOfExpertsAreReadOnce) {
  spec_.mutable_targets()->RemoveLast();
  v1::ParallelLayout& parallel = *spec_.mutable_targets(0)->mutable_parallel_layout();
  parallel.set_expert_parallel_size(4);
  parallel.set_redundant_experts(4);
  const auto set = PlanTargets(spec_, {});
  ASSERT_TRUE(set.ok()) << set.status();
  EXPECT_TRUE((*set)->is_joint());
  const v1::PlanSummary& summary = (*set)->summary();
  EXPECT_EQ(summary.read_bytes(), summary.needed_bytes());
  EXPECT_EQ(summary.read_once_memory_budget_bytes(), (*set)->joint_memory().Total(4, 1));
  EXPECT_FALSE(summary.has_joint());
  EXPECT_GT((*set)->plan(0).summary.read_bytes(), summary.read_bytes()) << "slot by slot";
  const auto tight =
      PlanTargets(spec_, {.memory_budget_bytes = summary.read_once_memory_budget_bytes() - 1});
  ASSERT_TRUE(tight.ok()) << tight.status();
  EXPECT_GT((*tight)->summary().read_amplification(), 1.0);
}

TEST_F(TargetSetTest, TheFiguresOfEachTargetAreThoseOfAJobOfItsOwn) {
  v1::ParallelLayout& parallel = *spec_.mutable_targets(0)->mutable_parallel_layout();
  parallel.set_expert_parallel_size(4);
  parallel.set_redundant_experts(4);
  v1::PrepJobSpec one = spec_;
  one.mutable_targets()->RemoveLast();
  const auto alone = PlanTargets(one, {});
  ASSERT_TRUE(alone.ok()) << alone.status();
  const auto first = PlanTargets(spec_, {});
  ASSERT_TRUE(first.ok()) << first.status();
  spec_.mutable_targets()->SwapElements(0, 1);
  const auto second = PlanTargets(spec_, {});
  ASSERT_TRUE(second.ok()) << second.status();
  const v1::PlanSummary& want = (*alone)->summary();
  for (const v1::PlanSummary& own : {(*first)->summary(), (*second)->summary().other_targets(0)}) {
    EXPECT_EQ(own.read_bytes(), want.read_bytes());
    EXPECT_EQ(own.read_amplification(), want.read_amplification());
    EXPECT_EQ(own.minimum_memory_budget_bytes(), want.minimum_memory_budget_bytes());
    EXPECT_EQ(own.read_once_memory_budget_bytes(), want.read_once_memory_budget_bytes());
    EXPECT_EQ(own.ranks_per_lease(), want.ranks_per_lease());
  }
  // Together some experts are read again: the copies of the first come last in the one target.
  EXPECT_GT((*first)->summary().joint().read_amplification(), 1.0);
}

TEST_F(TargetSetTest, ErrorsSayWhichTargetTheyAreAbout) {
  const std::pair<const char*, std::function<void(v1::PrepJobSpec&)>> cases[] = {
      {"targets[1]: parallel_layout.tensor_parallel_size is 0",
       [](auto& s) {
         s.mutable_targets(1)->mutable_parallel_layout()->set_tensor_parallel_size(0);
       }},
      {"targets[1]: intermediate size 512 does not divide among 5",
       [](auto& s) {
         s.mutable_targets(1)->mutable_parallel_layout()->set_tensor_parallel_size(5);
       }},
      {"targets[0] and targets[1] have one destination_uri",
       [](auto& s) { s.mutable_targets(1)->set_destination_uri(s.targets(0).destination_uri()); }},
      {"targets[1]: destination_uri is the source itself",
       [](auto& s) { s.mutable_targets(1)->set_destination_uri(s.source_uri()); }},
      {"targets have 4098 ranks together, want at most 4096",
       [](auto& s) {
         s.mutable_targets(0)->mutable_parallel_layout()->set_tensor_parallel_size(4096);
       }},
      {"targets[0]: naming scheme 'tensorrt'",
       [](auto& s) { s.mutable_targets(0)->set_naming("tensorrt"); }},
  };
  for (const auto& [text, change] : cases) {
    v1::PrepJobSpec spec = spec_;
    change(spec);
    const absl::Status status = PlanTargets(spec, {}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
  }
}

}  // namespace
}  // namespace shardprep
