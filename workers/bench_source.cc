#include "workers/bench_source.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kernels/status_macros.h"
#include "workers/block_plan.h"
#include "workers/dtype.h"
#include "workers/safetensors.h"

namespace shardprep {
namespace {

constexpr int64_t kHidden = 7168;
constexpr int64_t kIntermediate = 3072;
constexpr int64_t kMostExperts = 8;  // of a layer

struct Matrix {
  const char* name;
  int64_t rows;
  int64_t columns;  // elements
};
constexpr Matrix kMatrices[] = {
    {"w1", kIntermediate, kHidden}, {"w3", kIntermediate, kHidden}, {"w2", kHidden, kIntermediate}};

int64_t WeightBytes(const Matrix& matrix) { return matrix.rows * matrix.columns / 2; }
int64_t ScaleBytes(const Matrix& matrix) { return matrix.rows * matrix.columns / 32; }

class TensorList {
 public:
  void Add(std::string name, Dtype dtype, std::vector<int64_t> shape, int64_t size_bytes) {
    entries_.push_back({.name = std::move(name),
                        .dtype = dtype,
                        .shape = std::move(shape),
                        .begin = end_,
                        .size_bytes = size_bytes});
    end_ += size_bytes;
  }

  void AddExpert(int64_t layer, int64_t expert) {
    for (const Matrix& matrix : kMatrices) {
      const std::string stem =
          absl::StrCat("layers.", layer, ".ffn.experts.", expert, ".", matrix.name);
      Add(stem + ".weight", Dtype::kI8, {matrix.rows, matrix.columns / 2}, WeightBytes(matrix));
      Add(stem + ".scale", Dtype::kF8E8M0, {matrix.rows, matrix.columns / 32}, ScaleBytes(matrix));
    }
  }

  const std::vector<TensorEntry>& entries() const { return entries_; }
  int64_t size_bytes() const { return end_; }

 private:
  std::vector<TensorEntry> entries_;
  int64_t end_ = 0;
};

std::string Config(int64_t layers, int64_t experts) {
  const nlohmann::json config = {{"model_type", "deepseek_v4"},
                                 {"hidden_size", kHidden},
                                 {"moe_intermediate_size", kIntermediate},
                                 {"n_routed_experts", experts},
                                 {"num_hidden_layers", layers},
                                 {"num_nextn_predict_layers", 0},
                                 {"hidden_act", "silu"},
                                 {"expert_dtype", "fp4"}};
  return config.dump(2);
}

// The next words of splitmix64.
void FillWithNoise(uint64_t& state, absl::Span<uint8_t> out) {
  for (size_t at = 0; at + sizeof(uint64_t) <= out.size(); at += sizeof(uint64_t)) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t word = state;
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
    word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
    word ^= word >> 31;
    std::memcpy(out.data() + at, &word, sizeof(word));
  }
}

absl::Status WriteLayer(ObjectStore& store, const std::string& name, const TensorList& tensors,
                        uint64_t seed, const std::atomic<bool>* stop) {
  SP_ASSIGN_OR_RETURN(const std::string header,
                      SerializeHeader(tensors.entries(), {{"format", "pt"}}));
  const int64_t piece = std::max(kBlockBytes, static_cast<int64_t>(header.size() + kDataAlignment));
  WriteOptions options;
  options.size_bytes = static_cast<int64_t>(header.size()) + tensors.size_bytes();
  std::vector<uint8_t> memory(
      static_cast<size_t>(store.WriteBufferBytes(options.size_bytes, piece)));
  options.buffer = absl::MakeSpan(memory);
  SP_ASSIGN_OR_RETURN(const auto writer, store.Create(name, options));
  SP_ASSIGN_OR_RETURN(absl::Span<uint8_t> out,
                      writer->Reserve(static_cast<int64_t>(header.size())));
  std::memcpy(out.data(), header.data(), header.size());
  SP_RETURN_IF_ERROR(writer->Advance(static_cast<int64_t>(header.size())));
  uint64_t state = seed;
  for (int64_t left = tensors.size_bytes(); left > 0;) {
    if (stop != nullptr && *stop) return absl::CancelledError("stopped");
    const int64_t size = std::min(left, piece);
    SP_ASSIGN_OR_RETURN(out, writer->Reserve(size));
    FillWithNoise(state, out.first(static_cast<size_t>(size)));
    SP_RETURN_IF_ERROR(writer->Advance(size));
    left -= size;
  }
  return writer->Commit(CommitGate()).status();
}

}  // namespace

int64_t BenchExpertBytes() {
  int64_t size_bytes = 0;
  for (const Matrix& matrix : kMatrices) size_bytes += WeightBytes(matrix) + ScaleBytes(matrix);
  return size_bytes;
}

absl::Status WriteBenchSource(ObjectStore& store, int64_t size_bytes,
                              const std::atomic<bool>* stop) {
  const int64_t experts = std::clamp<int64_t>(size_bytes / BenchExpertBytes(), 1, kMostExperts);
  const int64_t layer_bytes = experts * BenchExpertBytes();
  const int64_t layers = std::max<int64_t>(1, (size_bytes + layer_bytes / 2) / layer_bytes);
  for (int64_t layer = 0; layer < layers; ++layer) {
    TensorList tensors;
    if (layer == 0) {
      tensors.Add("norm.weight", Dtype::kBF16, {kHidden}, 2 * kHidden);
    }
    for (int64_t expert = 0; expert < experts; ++expert) tensors.AddExpert(layer, expert);
    const std::string name = absl::StrFormat("model-%05d-of-%05d.safetensors", layer + 1, layers);
    SP_RETURN_IF_ERROR(
        WriteLayer(store, name, tensors, 0x5368617264ull + static_cast<uint64_t>(layer), stop));
  }
  return store.Put("config.json", Config(layers, experts), CommitGate()).status();
}

}  // namespace shardprep
