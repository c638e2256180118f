// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/prefill/prefill_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/bf16.h"
#include "kernels/cuda/common/host_oracle.h"

namespace crumb::kernels::cuda {
namespace {

double Rounded(OutType type, double x) {
  if (type == OutType::kF32) return static_cast<float>(x);
  return Bf16ToFloat(Bf16FromFloat(static_cast<float>(x)));
}

}  // namespace

PrefillCase::PrefillCase(const PrefillOptions& options)
    : o_(options), batch_(static_cast<int>(options.sequences.size())), random_(options.seed) {
  for (const ChunkLengths& s : o_.sequences) {
    max_pages_ = std::max(max_pages_, s.pages);
    fresh_max_ = std::max(fresh_max_, s.fresh);
    recent_capacity_ = std::max(recent_capacity_, s.recent + 3);
    fresh_begin_.push_back(tokens_);
    tokens_ += s.fresh;
  }
  MakePages();
  MakeRows();
  MakeTransforms();
  const size_t elements = static_cast<size_t>(rows()) * o_.tile.head_dim;
  out_.Allocate(elements * (o_.out_type == OutType::kF32 ? 4 : 2));
  lse_.Allocate(static_cast<size_t>(rows()) * 4);
  Upload();
}

void PrefillCase::MakePages() {
  const size_t tile_bytes = o_.tile.int2_bytes(), page_bytes = tile_bytes * o_.kv_heads;
  const size_t slots = static_cast<size_t>(batch_) * max_pages_;
  std::vector<size_t> slot(slots);
  std::iota(slot.begin(), slot.end(), 0);
  std::shuffle(slot.begin(), slot.end(), random_);
  arena_host_.resize(slots * page_bytes);
  for (size_t i = 0; i < slots * o_.kv_heads; ++i) {
    RandomTile(o_.tile, 1.0, o_.value_std, random_, arena_host_.data() + i * tile_bytes);
  }
  arena_.Allocate(arena_host_.size());
  std::vector<uint64_t> table;
  for (size_t i = 0; i < slots; ++i) {
    page_offset_.push_back(slot[i] * page_bytes);
    const bool exists = static_cast<int>(i % max_pages_) < o_.sequences[i / max_pages_].pages;
    table.push_back(exists ? arena_.address() + page_offset_.back() : 8);
  }
  table_.Upload(table);
}

void PrefillCase::MakeRows() {
  const int dim = o_.tile.head_dim;
  const size_t fresh = static_cast<size_t>(tokens_) * o_.kv_heads * dim;
  q_host_ = RandomRows(static_cast<size_t>(rows()) * dim, o_.logit_std, random_);
  k_host_ = RandomRows(fresh, 1.0, random_);
  v_host_ = RandomRows(fresh, o_.value_std, random_);
  // [batch, kv_heads, k or v, slot, dim]
  const auto windows = [&](int slots) {
    std::vector<Bf16> rows;
    for (int i = 0; i < batch_ * o_.kv_heads * 2; ++i) {
      const std::vector<Bf16> part =
          RandomRows(static_cast<size_t>(slots) * dim, i % 2 == 0 ? 1.0 : o_.value_std, random_);
      rows.insert(rows.end(), part.begin(), part.end());
    }
    return rows;
  };
  sink_host_ = windows(64);
  recent_host_ = windows(recent_capacity_);
  sink_.Upload(sink_host_);
  recent_.Upload(recent_host_);
  std::vector<uint64_t> sink_address, recent_address;
  std::vector<int32_t> lengths[4];
  for (int s = 0; s < batch_; ++s) {
    const int64_t heads = static_cast<int64_t>(s) * o_.kv_heads;
    sink_address.push_back(sink_.address() + heads * 256 * dim);
    recent_address.push_back(recent_.address() + heads * 4 * recent_capacity_ * dim);
    recent_begin_.push_back(static_cast<int>(random_() % recent_capacity_));
    const ChunkLengths& l = o_.sequences[s];
    lengths[0].push_back(l.sink);
    lengths[1].push_back(l.pages);
    lengths[2].push_back(l.recent);
    lengths[3].push_back(l.fresh);
  }
  sink_address_.Upload(sink_address);
  recent_address_.Upload(recent_address);
  for (int i = 0; i < 4; ++i) lengths_[i].Upload(lengths[i]);
  lengths_[4].Upload(recent_begin_);
  lengths_[5].Upload(fresh_begin_);
}

void PrefillCase::MakeTransforms() {
  const int dim = o_.tile.head_dim;
  if (o_.transforms) {
    for (int h = 0; h < o_.kv_heads; ++h) {
      for (std::vector<float>* all : {&rotation_k_, &rotation_v_}) {
        const std::vector<float> one = RandomRotation(dim, random_);
        all->insert(all->end(), one.begin(), one.end());
      }
    }
    mean_v_ = RandomFloats(static_cast<size_t>(o_.kv_heads) * dim, 0.3 * o_.value_std, random_);
    device_rotation_k_.Upload(rotation_k_);
    device_rotation_v_.Upload(rotation_v_);
    device_mean_.Upload(mean_v_);
  }
  if (o_.offset) {
    position_blocks_ = 3;
    offset_host_ = RandomFloats(static_cast<size_t>(rows()) * position_blocks_, 8.0, random_);
    device_offset_.Upload(offset_host_);
  }
  if (o_.shift) {
    shift_host_ = RandomFloats(q_heads(), 0.5, random_);
    device_shift_.Upload(shift_host_);
  }
  if (o_.sink_logit) {
    sink_logit_ = RandomFloats(q_heads(), 3.0, random_);
    device_sink_logit_.Upload(sink_logit_);
  }
}

void PrefillCase::Upload() {
  arena_.Upload(arena_host_);
  q_.Upload(q_host_);
  k_.Upload(k_host_);
  v_.Upload(v_host_);
}

PrefillAttentionParams PrefillCase::Params() const {
  const int dim = o_.tile.head_dim;
  PrefillAttentionParams p;
  p.shape.tile = o_.tile;
  p.shape.batch = batch_;
  p.shape.max_pages = max_pages_;
  p.shape.fresh_max = fresh_max_;
  p.shape.kv_heads = o_.kv_heads;
  p.shape.q_heads = q_heads();
  p.lengths = {lengths_[0].as<int32_t>(), lengths_[1].as<int32_t>(), lengths_[2].as<int32_t>(),
               lengths_[4].as<int32_t>(), lengths_[3].as<int32_t>(), lengths_[5].as<int32_t>()};
  p.q = q_.as<Bf16>();
  p.out = out_.as<void>();
  p.out_type = o_.out_type;
  p.lse = lse_.as<float>();
  p.k = k_.as<Bf16>();
  p.v = v_.as<Bf16>();
  p.token_stride = o_.kv_heads * dim;
  p.head_stride = dim;
  p.page_address = table_.as<uint64_t>();
  p.page_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
  p.sink = {sink_address_.as<uint64_t>(), 0, 256 * dim, 2 * dim, 128 * dim};
  p.recent = {recent_address_.as<uint64_t>(), 0, 4 * recent_capacity_ * dim, 2 * dim,
              2 * recent_capacity_ * dim};
  p.recent_capacity = recent_capacity_;
  if (o_.transforms) {
    p.rotation_k = device_rotation_k_.as<float>();
    p.rotation_v = device_rotation_v_.as<float>();
    p.mean_v = device_mean_.as<float>();
  }
  if (o_.offset) p.offset = device_offset_.as<float>();
  p.position_blocks = position_blocks_;
  p.pages_per_position_block = 2;
  if (o_.shift) p.shift = device_shift_.as<float>();
  if (o_.sink_logit) p.sink_logit = device_sink_logit_.as<float>();
  p.soft_cap = o_.soft_cap;
  p.window = o_.window;
  return p;
}

void PrefillCase::Run() {
  out_.Fill(0xff);
  lse_.Fill(0xff);
  ASSERT_CUDA(PrefillAttention(Params(), nullptr, o_.mma));
  ASSERT_CUDA(cudaDeviceSynchronize());
}

std::vector<float> PrefillCase::Out() const {
  if (o_.out_type == OutType::kF32) return out_.Download<float>();
  std::vector<float> out;
  for (const Bf16 x : out_.Download<Bf16>()) out.push_back(Bf16ToFloat(x));
  return out;
}

uint8_t* PrefillCase::Tile(int sequence, int page, int head) {
  return arena_host_.data() + page_offset_[sequence * max_pages_ + page] +
         head * o_.tile.int2_bytes();
}

// Fresh rows follow the recent ones, as in the definition.
AttentionParams PrefillCase::HostParams(int sequence, std::vector<uint64_t>* pages,
                                        std::vector<Bf16>* recent) const {
  const int dim = o_.tile.head_dim;
  const ChunkLengths& l = o_.sequences[sequence];
  AttentionParams p;
  p.shape = o_.tile;
  p.q_tokens = l.fresh;
  p.kv_heads = o_.kv_heads;
  p.q_heads = q_heads();
  p.q = q_host_.data() + static_cast<size_t>(fresh_begin_[sequence]) * p.q_heads * dim;
  p.sink_tokens = l.sink;
  p.sink_k = sink_host_.data() + static_cast<size_t>(sequence) * p.kv_heads * 128 * dim;
  p.sink_v = p.sink_k + 64 * dim;
  p.sink_head_stride = 128 * dim;
  p.sink_token_stride = dim;
  p.pages = l.pages;
  for (int page = 0; page < l.pages; ++page) {
    pages->push_back(reinterpret_cast<uint64_t>(arena_host_.data() +
                                                page_offset_[sequence * max_pages_ + page]));
  }
  p.page_address = pages->data();
  p.page_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
  const int tokens = l.recent + l.fresh;
  for (int h = 0; h < o_.kv_heads; ++h) {
    for (const bool value : {false, true}) {
      for (int t = 0; t < tokens; ++t) {
        const Bf16* row;
        if (t < l.recent) {
          const int slot = (recent_begin_[sequence] + t) % recent_capacity_;
          row = recent_host_.data() +
                (((static_cast<size_t>(sequence) * o_.kv_heads + h) * 2 + (value ? 1 : 0)) *
                     recent_capacity_ +
                 slot) *
                    dim;
        } else {
          row =
              (value ? v_host_ : k_host_).data() +
              (static_cast<size_t>(fresh_begin_[sequence] + t - l.recent) * o_.kv_heads + h) * dim;
        }
        recent->insert(recent->end(), row, row + dim);
      }
    }
  }
  p.recent_tokens = p.recent_capacity = tokens;
  p.recent_k = recent->data();
  p.recent_v = p.recent_k + static_cast<size_t>(tokens) * dim;
  p.recent_head_stride = 2 * static_cast<int64_t>(tokens) * dim;
  p.recent_token_stride = dim;
  if (o_.transforms) {
    p.rotation_k = rotation_k_.data();
    p.rotation_v = rotation_v_.data();
    p.mean_v = mean_v_.data();
  }
  if (o_.offset) {
    p.offset = offset_host_.data() +
               static_cast<size_t>(fresh_begin_[sequence]) * p.q_heads * position_blocks_;
  }
  p.position_blocks = position_blocks_;
  p.pages_per_position_block = 2;
  if (o_.shift) p.shift = shift_host_.data();
  if (o_.sink_logit) p.sink_logit = sink_logit_.data();
  p.soft_cap = o_.soft_cap;
  p.window = o_.window;
  return p;
}

PrefillCase::RowErrors PrefillCase::ErrorsOf(int row, const std::vector<float>& out,
                                             const std::vector<float>& lse) const {
  const int dim = o_.tile.head_dim, token = row / q_heads();
  int sequence = batch_ - 1;
  while (fresh_begin_[sequence] > token || o_.sequences[sequence].fresh == 0) --sequence;
  std::vector<uint64_t> pages;
  std::vector<Bf16> recent;
  const AttentionParams p = HostParams(sequence, &pages, &recent);
  const OracleRow expected = OracleAttend(p, token - fresh_begin_[sequence], row % q_heads());
  double error = 0.0, rounding = 0.0, norm = 0.0;
  for (int i = 0; i < dim; ++i) {
    const double difference = out[static_cast<size_t>(row) * dim + i] - expected.out[i];
    const double rounded = Rounded(o_.out_type, expected.out[i]) - expected.out[i];
    error += difference * difference;
    rounding += rounded * rounded;
    norm += expected.out[i] * expected.out[i];
  }
  if (!(std::abs(lse[row] - expected.lse) < 2e-2)) {
    ADD_FAILURE() << "row " << row << ": lse " << lse[row] << ", not " << expected.lse;
  }
  return {std::sqrt(error / norm), std::sqrt(rounding / norm)};
}

double PrefillCase::RowError(int row, const std::vector<float>& out,
                             const std::vector<float>& lse) const {
  return ErrorsOf(row, out, lse).all;
}

void PrefillCase::VisitErrors(int rows_max,
                              const std::function<void(const RowErrors&)>& visit) const {
  const std::vector<float> out = Out(), lse = Lse();
  const int step = std::max(1, rows() / rows_max);
  for (int row = 0; row < rows() + step - 1; row += step) {
    visit(ErrorsOf(std::min(row, rows() - 1), out, lse));
  }
}

double PrefillCase::WorstError(int rows_max) const {
  double worst = 0.0;
  VisitErrors(rows_max, [&](const RowErrors& of) {
    if (!(of.all <= worst)) worst = of.all;
  });
  return worst;
}

double PrefillCase::WorstOfBound(double bound, int rows_max) const {
  double worst = 0.0;
  VisitErrors(rows_max, [&](const RowErrors& of) {
    const double share = of.all / std::max(bound, 1.1 * of.rounding);
    if (!(share <= worst)) worst = share;
  });
  return worst;
}

}  // namespace crumb::kernels::cuda
