// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/decode_bench.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <utility>

#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"
#include "kernels/bf16.h"
#include "kernels/cuda/common/host_oracle.h"
#include "kernels/cuda/decode/decode_attention.h"

namespace crumb::bench {
namespace {

using kernels::Bf16;
using kernels::TileShape;

constexpr int kLayers = 20;
constexpr int kSinkTokens = 64;
constexpr int kRecentTokens = 287;
constexpr int kRingSlots = 328;
constexpr int kPositionBlocks = 64;

int PagesOf(int context, const TileShape& tile) {
  return std::max(0, (context - kSinkTokens - kRecentTokens) / tile.tokens);
}

// The device memory of one workload, without arena and windows.
class Setup {
 public:
  Setup(const DecodeWorkload& w, uint8_t* arena, Bf16* windows)
      : w_(w), arena_(arena), windows_(windows), dim_(w.tile.head_dim) {
    for (const int context : w.contexts) pages_.push_back(PagesOf(context, w.tile));
    batch_ = static_cast<int>(pages_.size());
    max_pages_ = std::max(1, *std::max_element(pages_.begin(), pages_.end()));
    slot_bytes_ = w.tile.int2_bytes() * w.kv_heads * kLayers;
    layer_window_ = static_cast<int64_t>(w.kv_heads) * (kSinkTokens + kRingSlots) * 4 * dim_;
    MakeTable();
    MakeTransforms();
    const size_t rows = static_cast<size_t>(batch_) * w.q_tokens * w.q_heads;
    q_ = Allocate<Bf16>(rows * dim_ * kLayers);
    FillBf16(rows * dim_ * kLayers, 77, q_.get());
    out_ = Allocate<Bf16>(rows * dim_ * kLayers);
    plan_ = Allocate<uint8_t>(DecodePlanBytes(Shape(), Tuning()));
    const size_t workspace = DecodeWorkspaceBytes(Shape(), Tuning());
    workspace_ = Allocate<uint8_t>(workspace);
    Check(cudaMemset(workspace_.get(), 0, workspace), "clear workspace");
  }

  kernels::cuda::DecodeShape Shape() const {
    kernels::cuda::DecodeShape shape;
    shape.tile = w_.tile;
    shape.batch = batch_;
    shape.max_pages = max_pages_;
    shape.q_tokens = w_.q_tokens;
    shape.kv_heads = w_.kv_heads;
    shape.q_heads = w_.q_heads;
    shape.batch_invariant = w_.batch_invariant;
    return shape;
  }

  kernels::cuda::DecodeTuning Tuning() const {
    if (!w_.ampere) return {.form = w_.form};
    return {.form = kernels::cuda::DecodeForm::kPlanned,
            .copy_path = kernels::cuda::CopyPath::kAsync16};
  }

  kernels::cuda::DecodeAttentionParams Params(int layer) const {
    kernels::cuda::DecodeAttentionParams p;
    p.shape = Shape();
    p.lengths = {sink_tokens_.get(), page_count_.get(), recent_tokens_.get(), recent_begin_.get()};
    const size_t rows = static_cast<size_t>(batch_) * w_.q_tokens * w_.q_heads * dim_;
    p.q = q_.get() + layer * rows;
    p.out = out_.get() + layer * rows;
    p.page_address = table_.get();
    p.page_head_stride = static_cast<int64_t>(w_.tile.int2_bytes());
    p.page_layer_offset = layer * w_.kv_heads * p.page_head_stride;
    p.sink = {window_address_.get(), layer * layer_window_, kSinkTokens * 4 * dim_, 2 * dim_,
              kSinkTokens * 2 * dim_};
    p.recent = {window_address_.get(),
                layer * layer_window_ + static_cast<int64_t>(w_.kv_heads) * kSinkTokens * 4 * dim_,
                kRingSlots * 4 * dim_, 2 * dim_, kRingSlots * 2 * dim_};
    p.recent_capacity = kRingSlots;
    const size_t matrix = static_cast<size_t>(w_.kv_heads) * dim_ * dim_;
    p.rotation_k = rotation_k_.get() + layer * matrix;
    p.rotation_v = rotation_v_.get() + layer * matrix;
    p.mean_v = mean_v_.get();
    if (w_.offsets) {
      p.offset = offset_.get() + layer * offset_host_.size() / kLayers;
      p.position_blocks = kPositionBlocks;
      p.pages_per_position_block = PagesPerBlock();
    }
    p.overlap_previous = w_.overlap;
    p.plan = plan_.get();
    p.workspace = workspace_.get();
    return p;
  }

  // Enqueues a step: the plan, and attention of every layer.
  void Enqueue(cudaStream_t stream) const {
    const kernels::cuda::DecodeAttentionParams first = Params(0);
    Check(kernels::cuda::PlanDecode(first.shape, first.lengths, 0, plan_.get(), stream, Tuning()),
          "plan");
    for (int layer = 0; layer < kLayers; ++layer) {
      kernels::cuda::DecodeAttentionParams p = Params(layer);
      if (layer == 0) p.overlap_previous = false;  // the plan precedes it
      Check(kernels::cuda::DecodeAttention(p, stream, Tuning()), "decode");
    }
  }

  double Bytes() const {
    double tokens = 0.0;
    for (const int pages : pages_) {
      tokens += static_cast<double>(pages) * w_.tile.int2_bytes() +
                (kSinkTokens + kRecentTokens) * 4.0 * dim_;
    }
    return tokens * w_.kv_heads + 4.0 * batch_ * w_.q_tokens * w_.q_heads * dim_;
  }

  // Returns the largest relative error of a few rows of two layers.
  double Error() const {
    double worst = 0.0;
    for (const int layer : {0, kLayers - 1}) {
      for (const int sequence : {0, batch_ / 2, batch_ - 1}) {
        const int head = (sequence + layer) % w_.kv_heads;
        worst = std::max(worst, RowError(layer, sequence, head));
      }
    }
    return worst;
  }

 private:
  void MakeTable() {
    const int total = std::accumulate(pages_.begin(), pages_.end(), 0);
    std::vector<uint64_t> slot(total);
    std::iota(slot.begin(), slot.end(), 0);
    std::shuffle(slot.begin(), slot.end(), random_);
    table_host_.assign(static_cast<size_t>(batch_) * max_pages_, 0);
    size_t next = 0;
    std::vector<uint64_t> windows;
    for (int s = 0; s < batch_; ++s) {
      for (int page = 0; page < pages_[s]; ++page) {
        table_host_[static_cast<size_t>(s) * max_pages_ + page] =
            reinterpret_cast<uint64_t>(arena_) + slot[next++] * slot_bytes_;
      }
      windows.push_back(reinterpret_cast<uint64_t>(windows_) +
                        static_cast<uint64_t>(s) * layer_window_ * kLayers);
      begin_host_.push_back(static_cast<int32_t>(random_() % kRingSlots));
    }
    table_ = Upload(table_host_);
    window_address_ = Upload(windows);
    sink_tokens_ = Upload(std::vector<int32_t>(batch_, kSinkTokens));
    recent_tokens_ = Upload(std::vector<int32_t>(batch_, kRecentTokens));
    page_count_ = Upload(std::vector<int32_t>(pages_.begin(), pages_.end()));
    recent_begin_ = Upload(begin_host_);
  }

  void MakeTransforms() {
    // Every layer has a copy of the matrices, because models have different ones.
    std::vector<float> k, v;
    for (int h = 0; h < w_.kv_heads; ++h) {
      const std::vector<float> a = RandomRotation(dim_, random_), b = RandomRotation(dim_, random_);
      k.insert(k.end(), a.begin(), a.end());
      v.insert(v.end(), b.begin(), b.end());
    }
    rotation_k_host_ = k;
    rotation_v_host_ = v;
    std::vector<float> all_k, all_v;
    for (int layer = 0; layer < kLayers; ++layer) {
      all_k.insert(all_k.end(), k.begin(), k.end());
      all_v.insert(all_v.end(), v.begin(), v.end());
    }
    rotation_k_ = Upload(all_k);
    rotation_v_ = Upload(all_v);
    std::normal_distribution<float> normal(0.0f, 0.3f);
    for (int i = 0; i < w_.kv_heads * dim_; ++i) mean_host_.push_back(normal(random_));
    mean_v_ = Upload(mean_host_);
    if (w_.offsets) {
      offset_host_.resize(static_cast<size_t>(batch_) * w_.q_tokens * w_.q_heads * kPositionBlocks *
                          kLayers);
      for (float& x : offset_host_) x = normal(random_);
      offset_ = Upload(offset_host_);
    }
  }

  int PagesPerBlock() const { return (max_pages_ + kPositionBlocks - 1) / kPositionBlocks; }

  double RowError(int layer, int sequence, int head) const {
    const size_t tile_bytes = w_.tile.int2_bytes();
    std::vector<uint8_t> tiles(tile_bytes * pages_[sequence]);
    std::vector<uint64_t> address;
    for (int page = 0; page < pages_[sequence]; ++page) {
      const uint64_t from = table_host_[static_cast<size_t>(sequence) * max_pages_ + page] +
                            (static_cast<uint64_t>(layer) * w_.kv_heads + head) * tile_bytes;
      uint8_t* to = tiles.data() + page * tile_bytes;
      Check(cudaMemcpy(to, reinterpret_cast<const void*>(from), tile_bytes, cudaMemcpyDeviceToHost),
            "tile");
      address.push_back(reinterpret_cast<uint64_t>(to));
    }
    const char* window = reinterpret_cast<const char*>(windows_) +
                         (static_cast<int64_t>(sequence) * kLayers + layer) * layer_window_;
    const int sink_rows = kSinkTokens * 2, recent_rows = kRingSlots * 2;
    const std::vector<Bf16> sink = Download(
        reinterpret_cast<const Bf16*>(window) + static_cast<int64_t>(head) * sink_rows * dim_,
        sink_rows * dim_);
    const std::vector<Bf16> recent =
        Download(reinterpret_cast<const Bf16*>(window) +
                     (static_cast<int64_t>(w_.kv_heads) * sink_rows + head * recent_rows) * dim_,
                 recent_rows * dim_);
    const int group = w_.q_heads / w_.kv_heads, row = head * group + (layer + sequence) % group;
    const size_t index =
        ((static_cast<size_t>(layer) * batch_ + sequence) * w_.q_tokens * w_.q_heads + row) * dim_;
    kernels::AttentionParams p;
    p.shape = w_.tile;
    p.q_tokens = w_.q_tokens;
    std::vector<Bf16> q = Download(q_.get() + index, dim_);
    // The oracle computes one KV head with one query head; later query tokens are not checked.
    q.resize(static_cast<size_t>(w_.q_tokens) * dim_);
    p.q = q.data();
    p.sink_tokens = kSinkTokens;
    p.sink_k = sink.data();
    p.sink_v = sink.data() + kSinkTokens * dim_;
    p.sink_token_stride = dim_;
    p.pages = pages_[sequence];
    p.page_address = address.data();
    p.recent_tokens = kRecentTokens;
    p.recent_begin = begin_host_[sequence];
    p.recent_capacity = kRingSlots;
    p.recent_k = recent.data();
    p.recent_v = recent.data() + kRingSlots * dim_;
    p.recent_token_stride = dim_;
    p.rotation_k = rotation_k_host_.data() + static_cast<size_t>(head) * dim_ * dim_;
    p.rotation_v = rotation_v_host_.data() + static_cast<size_t>(head) * dim_ * dim_;
    p.mean_v = mean_host_.data() + head * dim_;
    std::vector<float> offset;
    if (w_.offsets) {
      const float* from = offset_host_.data() + index / dim_ * kPositionBlocks;
      offset.assign(from, from + kPositionBlocks);
      offset.resize(static_cast<size_t>(w_.q_tokens) * kPositionBlocks);
      p.offset = offset.data();
      p.position_blocks = kPositionBlocks;
      p.pages_per_position_block = PagesPerBlock();
    }
    const kernels::cuda::OracleRow expected = kernels::cuda::OracleAttend(p, 0, 0);
    const std::vector<Bf16> out = Download(out_.get() + index, dim_);
    double error = 0.0, norm = 0.0;
    for (int i = 0; i < dim_; ++i) {
      const double difference = kernels::Bf16ToFloat(out[i]) - expected.out[i];
      error += difference * difference;
      norm += expected.out[i] * expected.out[i];
    }
    return std::sqrt(error / norm);
  }

  const DecodeWorkload& w_;
  uint8_t* arena_;
  Bf16* windows_;
  const int dim_;
  int batch_ = 0;
  int max_pages_ = 0;
  size_t slot_bytes_ = 0;
  int64_t layer_window_ = 0;
  std::mt19937 random_{20240601};
  std::vector<int> pages_;
  std::vector<uint64_t> table_host_;
  std::vector<int32_t> begin_host_;
  std::vector<float> rotation_k_host_, rotation_v_host_, mean_host_, offset_host_;
  Device<uint64_t> table_, window_address_;
  Device<int32_t> sink_tokens_, recent_tokens_, page_count_, recent_begin_;
  Device<float> rotation_k_, rotation_v_, mean_v_, offset_;
  Device<Bf16> q_, out_;
  Device<uint8_t> plan_, workspace_;
};

size_t ArenaBytes(const DecodeWorkload& w) {
  size_t pages = 0;
  for (const int context : w.contexts) pages += PagesOf(context, w.tile);
  return pages * w.tile.int2_bytes() * w.kv_heads * kLayers;
}
size_t WindowBytes(const DecodeWorkload& w) {
  return w.contexts.size() * kLayers * w.kv_heads * (kSinkTokens + kRingSlots) * 4 *
         w.tile.head_dim;
}

DecodeWorkload Uniform(const std::string& name, int q_heads, int batch, int context,
                       double target_us) {
  DecodeWorkload w;
  w.name = name;
  w.q_heads = q_heads;
  w.contexts.assign(batch, context);
  w.target_us = target_us;
  return w;
}

// Adds 4 and 8 query heads over one KV head, 16 query heads per KV head over 4, and other
// head_dims.
void AddOtherShapes(std::vector<DecodeWorkload>* all) {
  for (const int q_heads : {4, 8}) {
    for (const auto& [batch, target_us] : {std::pair{1, 8}, {16, 34}}) {
      DecodeWorkload w = Uniform("one KV head", q_heads, batch, 102400, target_us);
      w.kv_heads = 1;
      all->push_back(w);
    }
  }
  DecodeWorkload w = Uniform("4 KV heads", 64, 32, 102400, 0);
  w.kv_heads = 4;
  all->push_back(w);
  for (const auto& [head_dim, group_size] : {std::pair{64, 64}, {256, 128}}) {
    for (const int batch : {1, 32}) {
      w = Uniform("head_dim", 32, batch, 32768, 0);
      w.tile.head_dim = head_dim;
      w.tile.group_size = group_size;
      all->push_back(w);
    }
  }
}

}  // namespace

DecodeBench::DecodeBench(const std::vector<DecodeWorkload>& workloads) {
  for (const DecodeWorkload& w : workloads) {
    if (!Supported(w)) continue;
    arena_bytes_ = std::max(arena_bytes_, ArenaBytes(w));
    window_bytes_ = std::max(window_bytes_, WindowBytes(w));
  }
  Check(cudaMalloc(reinterpret_cast<void**>(&arena_), arena_bytes_), "arena");
  Check(cudaMalloc(reinterpret_cast<void**>(&windows_), window_bytes_), "windows");
  FillBf16(window_bytes_ / sizeof(Bf16), 5, windows_);
}

DecodeBench::~DecodeBench() {
  cudaFree(arena_);
  cudaFree(windows_);
}

bool DecodeBench::Supported(const DecodeWorkload& w) {
  kernels::cuda::DecodeShape shape;
  shape.tile = w.tile;
  shape.q_tokens = w.q_tokens;
  shape.kv_heads = w.kv_heads;
  shape.q_heads = w.q_heads;
  return kernels::cuda::DecodeSupported(shape);
}

DecodeResult DecodeBench::Run(const DecodeWorkload& w) {
  FillTiles(w.tile, ArenaBytes(w) / w.tile.int2_bytes(), 11, arena_);
  const Setup setup(w, arena_, windows_);
  DecodeResult result;
  result.us = TimeGraph([&](cudaStream_t stream) { setup.Enqueue(stream); }) / kLayers;
  result.bytes = setup.Bytes();
  result.rel_error = setup.Error();
  return result;
}

std::vector<DecodeWorkload> StandardDecodeWorkloads() {
  std::vector<DecodeWorkload> all = {
      Uniform("uniform", 32, 1, 32768, 9),     Uniform("uniform", 32, 1, 102400, 20),
      Uniform("uniform", 32, 8, 32768, 46),    Uniform("uniform", 32, 32, 32768, 0),
      Uniform("uniform", 32, 32, 102400, 500), Uniform("uniform", 32, 128, 8192, 205),
      Uniform("uniform", 64, 1, 102400, 0),    Uniform("uniform", 64, 32, 102400, 520),
      Uniform("uniform", 96, 1, 102400, 0),    Uniform("uniform", 96, 32, 102400, 580),
  };
  for (const int group : {3, 5, 6, 7, 12, 16}) {
    all.push_back(Uniform("odd groups", 8 * group, 32, 32768, 0));
  }
  DecodeWorkload ragged = Uniform("1 x 128k + 31 x 2k", 32, 31, 2048, 0);
  ragged.contexts.insert(ragged.contexts.begin() + 7, 131072);
  all.push_back(ragged);
  all.push_back(Uniform("same bytes", 32, 32, (131072 + 31 * 2048) / 32, 0));
  ragged = Uniform("8 x 64k + 120 x 1k", 32, 120, 1024, 0);
  ragged.contexts.insert(ragged.contexts.begin() + 20, 8, 65536);
  all.push_back(ragged);
  all.push_back(Uniform("same bytes", 32, 128, (8 * 65536 + 120 * 1024) / 128, 0));
  DecodeWorkload w = Uniform("4 query tokens", 32, 32, 32768, 0);
  w.q_tokens = 4;
  all.push_back(w);
  for (const int group_size : {64, 32}) {
    w = Uniform("group size", 32, 32, 32768, 0);
    w.tile.group_size = group_size;
    all.push_back(w);
  }
  w = Uniform("16-byte copies", 32, 32, 32768, 0);
  w.ampere = true;
  all.push_back(w);
  w = Uniform("fixed splits", 32, 32, 32768, 0);
  w.batch_invariant = true;
  all.push_back(w);
  for (const int context : {32768, 102400}) {
    w = Uniform("overlapped calls", 32, 1, context, 0);
    w.overlap = true;
    all.push_back(w);
  }
  w = Uniform("offsets", 32, 32, 102400, 0);
  w.offsets = true;
  all.push_back(w);
  w = Uniform("8 query tokens", 32, 32, 32768, 0);
  w.q_tokens = 8;
  all.push_back(w);
  // A rank of a model with one KV head per rank, which 12 query heads share.
  w = Uniform("one KV head", 12, 1, 102400, 8);
  w.kv_heads = 1;
  all.push_back(w);
  all.push_back(Uniform("two sequences", 32, 2, 32768, 0));
  // Adds a workload again with the other form.
  const auto add_planned = [&all](size_t same) {
    DecodeWorkload planned = all[same];
    planned.form = kernels::cuda::DecodeForm::kPlanned;
    planned.name += ", with a plan";
    all.push_back(planned);
  };
  const size_t end = all.size();
  for (const size_t same : {size_t{0}, size_t{1}, end - 2, end - 1}) add_planned(same);
  // The plan chooses the form.
  for (const auto& [batch, context] : {std::pair{4, 32768}, {8, 102400}}) {
    all.push_back(Uniform("some sequences", 32, batch, context, 0));
    add_planned(all.size() - 1);
  }
  w = Uniform("one KV head", 12, 16, 102400, 34);
  w.kv_heads = 1;
  all.push_back(w);
  add_planned(all.size() - 1);
  add_planned(2);
  AddOtherShapes(&all);
  return all;
}

}  // namespace crumb::bench
