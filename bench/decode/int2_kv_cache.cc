// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <numeric>
#include <random>

#include "bench/decode/kv_cache.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"

namespace crumb::bench {
namespace {

constexpr int kSink = SequenceShape::kSinkTokens;
constexpr int kSlots = SequenceShape::kRingSlots;
constexpr int64_t kRowBytes = 2 * kHeadDim;

}  // namespace

Int2KvCache::Int2KvCache(const ModelShape& model, const SequenceShape& sequence, int batch)
    : model_(model),
      sequence_(sequence),
      batch_(batch),
      slot_bytes_(static_cast<int64_t>(tile_.int2_bytes()) * model.kv_heads * model.layers),
      layer_window_(model.kv_heads * (kSink + kSlots) * 2 * kRowBytes),
      transforms_(model.layers * model.kv_heads, /*metric=*/true) {
  const size_t slots = static_cast<size_t>(batch) * (sequence.pages + 1);
  slots_ = Allocate<uint8_t>(slots * slot_bytes_);
  FillTiles(tile_, slots * model.kv_heads * model.layers, 11, slots_.get());
  const size_t window_elements = static_cast<size_t>(batch) * model.layers * layer_window_ / 2;
  windows_ = Allocate<kernels::Bf16>(window_elements);
  FillBf16(window_elements, 12, windows_.get());
  MakeTable();
  MakeTransforms();
  offset_ = Allocate<float>(static_cast<size_t>(batch) * model.q_heads);
  plan_ = Allocate<uint8_t>(kernels::cuda::DecodePlanBytes(Shape()));
  const size_t workspace = kernels::cuda::DecodeWorkspaceBytes(Shape());
  workspace_ = Allocate<uint8_t>(workspace);
  Check(cudaMemset(workspace_.get(), 0, workspace), "clear workspace");
  MakeEvict();
}

void Int2KvCache::MakeTable() {
  std::mt19937 random(20240601);
  const size_t pages = static_cast<size_t>(batch_) * sequence_.pages;
  std::vector<uint64_t> table(pages);
  for (size_t i = 0; i < pages; ++i) {
    table[i] = reinterpret_cast<uint64_t>(slots_.get()) + i * slot_bytes_;
  }
  std::shuffle(table.begin(), table.end(), random);
  std::vector<uint64_t> windows;
  for (int s = 0; s < batch_; ++s) {
    windows.push_back(reinterpret_cast<uint64_t>(windows_.get()) +
                      static_cast<uint64_t>(s) * layer_window_ * model_.layers);
    begin_host_.push_back(static_cast<int32_t>(random() % kSlots));
  }
  table_ = Upload(table);
  window_address_ = Upload(windows);
  sink_tokens_ = Upload(std::vector<int32_t>(batch_, kSink));
  recent_tokens_ = Upload(std::vector<int32_t>(batch_, SequenceShape::kRecentTokens));
  pages_ = Upload(std::vector<int32_t>(batch_, sequence_.pages));
  recent_begin_ = Upload(begin_host_);
}

// Copies the matrices for every layer, because models have different ones.
void Int2KvCache::MakeTransforms() {
  std::mt19937 random(20240602);
  std::vector<float> layer_rotations, rotations;
  for (int head = 0; head < 2 * model_.kv_heads; ++head) {
    const std::vector<float> rotation = RandomRotation(kHeadDim, random);
    layer_rotations.insert(layer_rotations.end(), rotation.begin(), rotation.end());
  }
  for (int layer = 0; layer < model_.layers; ++layer) {
    rotations.insert(rotations.end(), layer_rotations.begin(), layer_rotations.end());
  }
  rotations_ = Upload(rotations);
  std::normal_distribution<float> normal(0.0f, 0.3f);
  std::vector<float> mean(static_cast<size_t>(model_.layers) * model_.kv_heads * kHeadDim);
  for (float& x : mean) x = normal(random);
  mean_k_ = Upload(mean);
  mean_v_ = Upload(mean);
}

void Int2KvCache::MakeEvict() {
  std::vector<uint64_t> rings, tiles;
  for (int s = 0; s < batch_; ++s) {
    rings.push_back(reinterpret_cast<uint64_t>(windows_.get()) +
                    static_cast<uint64_t>(s) * layer_window_ * model_.layers +
                    model_.kv_heads * kSink * 2 * kRowBytes);
    const size_t slot = static_cast<size_t>(batch_) * sequence_.pages + s;
    tiles.push_back(reinterpret_cast<uint64_t>(slots_.get()) + slot * slot_bytes_);
  }
  ring_address_ = Upload(rings);
  evict_address_ = Upload(tiles);
  windows_count_ = Upload(std::vector<int32_t>{batch_});
  const size_t tile_count = static_cast<size_t>(batch_) * model_.layers * model_.kv_heads;
  sums_ = Allocate<uint32_t>(tile_count);
  status_ = Upload(std::vector<uint32_t>(batch_, 0));
  const size_t workspace =
      kernels::cuda::EvictWorkspaceBytes(batch_, model_.layers, model_.kv_heads);
  evict_workspace_ = Allocate<uint8_t>(workspace);
  Check(cudaMemset(evict_workspace_.get(), 0, workspace), "clear workspace");
  evict_.tile = tile_;
  evict_.method = kernels::Method::kCrumb;
  evict_.layers = model_.layers;
  evict_.kv_heads = model_.kv_heads;
  evict_.windows_max = batch_;
  evict_.windows = windows_count_.get();
  evict_.ring_address = ring_address_.get();
  evict_.ring_begin = recent_begin_.get();
  evict_.ring_capacity = kSlots;
  evict_.ring_layer_stride = layer_window_;
  evict_.ring_head_stride = kSlots * 2 * kRowBytes;
  evict_.ring_token_stride = kRowBytes;
  evict_.ring_v_offset = kSlots * kRowBytes;
  evict_.tile_address = evict_address_.get();
  evict_.tile_head_stride = static_cast<int64_t>(tile_.int2_bytes());
  evict_.tile_layer_stride = model_.kv_heads * evict_.tile_head_stride;
  transforms_.Set(&evict_);
  evict_.k.clip = evict_.v.clip = 0.92f;
  evict_.status = status_.get();
  evict_.checksums = sums_.get();
  evict_.workspace = evict_workspace_.get();
}

kernels::cuda::DecodeShape Int2KvCache::Shape() const {
  kernels::cuda::DecodeShape shape;
  shape.tile = tile_;
  shape.batch = batch_;
  shape.max_pages = sequence_.pages;
  shape.kv_heads = model_.kv_heads;
  shape.q_heads = model_.q_heads;
  return shape;
}

kernels::cuda::DecodeLengths Int2KvCache::Lengths() const {
  return {sink_tokens_.get(), pages_.get(), recent_tokens_.get(), recent_begin_.get()};
}

kernels::cuda::Bf16Rows Int2KvCache::Ring(int layer) const {
  return {window_address_.get(), layer * layer_window_ + model_.kv_heads * kSink * 2 * kRowBytes,
          kSlots * 2 * kRowBytes, kRowBytes, kSlots * kRowBytes};
}

void Int2KvCache::Plan(cudaStream_t stream) const {
  Check(kernels::cuda::PlanDecode(Shape(), Lengths(), 0, plan_.get(), stream), "plan");
}

void Int2KvCache::SetAppend(int layer, models::cuda::RopeParams* p) const {
  p->ring = Ring(layer);
  p->begin = recent_begin_.get();
  p->tokens = recent_tokens_.get();
  p->capacity = kSlots;
  p->mean_k = mean_k_.get() + static_cast<size_t>(layer) * model_.kv_heads * kHeadDim;
  p->offset = offset_.get();
}

void Int2KvCache::Attend(int layer, const kernels::Bf16* q, kernels::Bf16* out,
                         cudaStream_t stream) const {
  kernels::cuda::DecodeAttentionParams p;
  p.shape = Shape();
  p.lengths = Lengths();
  p.q = q;
  p.out = out;
  p.page_address = table_.get();
  p.page_head_stride = static_cast<int64_t>(tile_.int2_bytes());
  p.page_layer_offset = layer * model_.kv_heads * p.page_head_stride;
  p.sink = {window_address_.get(), layer * layer_window_, kSink * 2 * kRowBytes, kRowBytes,
            kSink * kRowBytes};
  p.recent = Ring(layer);
  p.recent_capacity = kSlots;
  const size_t first = static_cast<size_t>(layer) * model_.kv_heads;
  p.rotation_k = rotations_.get() + 2 * first * kHeadDim * kHeadDim;
  p.rotation_v = p.rotation_k + model_.kv_heads * kHeadDim * kHeadDim;
  p.mean_v = mean_v_.get() + first * kHeadDim;
  p.offset = offset_.get();
  p.overlap_previous = layer > 0;  // the first layer must wait for the plan
  p.plan = plan_.get();
  p.workspace = workspace_.get();
  Check(kernels::cuda::DecodeAttention(p, stream), "attention");
}

void Int2KvCache::Evict(cudaStream_t stream) const {
  Check(kernels::cuda::EvictWindows(evict_, stream), "evict");
}

}  // namespace crumb::bench
