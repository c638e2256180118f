// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/kernels/cuda/decode/decode_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/bf16.h"
#include "kernels/cuda/common/host_oracle.h"
#include "kernels/fp16.h"
#include "kernels/tile_codec.h"

namespace crumb::kernels::cuda {
namespace {

double Rounded(OutType type, double x) {
  if (type == OutType::kF32) return static_cast<float>(x);
  return Bf16ToFloat(Bf16FromFloat(static_cast<float>(x)));
}

}  // namespace

DecodeCase::DecodeCase(const DecodeOptions& options)
    : options_(options),
      batch_(static_cast<int>(options.sequences.size())),
      random_(options.seed),
      lengths_(options.sequences) {
  for (const SequenceLengths& s : lengths_) {
    options_.max_pages = std::max({options_.max_pages, s.pages, 1});
    recent_capacity_ = std::max(recent_capacity_, s.recent + 3);
  }
  MakePages();
  MakeWindows();
  MakeTransforms();
  const size_t rows = static_cast<size_t>(batch_) * options_.q_tokens * q_heads();
  q_host_ = RandomRows(rows * options_.tile.head_dim, options_.logit_std, random_);
  q_.Upload(q_host_);
  out_.Allocate(rows * options_.tile.head_dim * (options_.out_type == OutType::kF32 ? 4 : 2));
  lse_.Allocate(rows * 4);
  SetLengths(lengths_);
  const DecodeShape shape = Params().shape;
  plan_.Allocate(DecodePlanBytes(shape, Tuning()));
  workspace_.Allocate(DecodeWorkspaceBytes(shape, Tuning()));
  workspace_.Fill(0);
}

void DecodeCase::MakePages() {
  const size_t tile_bytes = options_.tile.int2_bytes();
  const size_t page_bytes = tile_bytes * options_.kv_heads;
  const size_t slots = static_cast<size_t>(batch_) * options_.max_pages;
  std::vector<uint64_t> slot(slots);
  std::iota(slot.begin(), slot.end(), 0);
  std::shuffle(slot.begin(), slot.end(), random_);
  // A few hundred different tiles suffice; copies of them fill all pages.
  const size_t variety = std::min<size_t>(slots * options_.kv_heads, 384);
  std::vector<uint8_t> pool(variety * tile_bytes);
  for (size_t i = 0; i < variety; ++i) {
    RandomTile(options_.tile, 1.0, options_.value_std, random_, pool.data() + i * tile_bytes);
  }
  arena_host_.resize(slots * page_bytes);
  for (size_t i = 0; i < slots * options_.kv_heads; ++i) {
    const size_t from = i < variety ? i : random_() % variety;
    std::memcpy(arena_host_.data() + i * tile_bytes, pool.data() + from * tile_bytes, tile_bytes);
  }
  arena_.Upload(arena_host_);
  std::vector<uint64_t> table;
  for (const uint64_t s : slot) {
    page_offset_.push_back(s * page_bytes);
    table.push_back(arena_.address() + s * page_bytes);
  }
  table_.Upload(table);
}

void DecodeCase::MakeWindows() {
  const int dim = options_.tile.head_dim;
  // [batch, kv_heads, k or v, slot, dim]
  sink_host_ =
      RandomRows(static_cast<size_t>(batch_) * options_.kv_heads * 2 * 64 * dim, 1.0, random_);
  recent_host_ = RandomRows(
      static_cast<size_t>(batch_) * options_.kv_heads * 2 * recent_capacity_ * dim, 1.0, random_);
  const auto scale_values = [&](std::vector<Bf16>& rows, int slots) {
    for (size_t i = 0; i < rows.size(); ++i) {
      if (i / (static_cast<size_t>(slots) * dim) % 2 == 1) {
        rows[i] = Bf16FromFloat(Bf16ToFloat(rows[i]) * static_cast<float>(options_.value_std));
      }
    }
  };
  scale_values(sink_host_, 64);
  scale_values(recent_host_, recent_capacity_);
  sink_.Upload(sink_host_);
  recent_.Upload(recent_host_);
  std::vector<uint64_t> sink_address, recent_address;
  for (int s = 0; s < batch_; ++s) {
    sink_address.push_back(sink_.address() +
                           static_cast<uint64_t>(s) * options_.kv_heads * 256 * dim);
    recent_address.push_back(recent_.address() + static_cast<uint64_t>(s) * options_.kv_heads * 4 *
                                                     recent_capacity_ * dim);
    recent_begin_.push_back(static_cast<int>(random_() % recent_capacity_));
  }
  sink_address_.Upload(sink_address);
  recent_address_.Upload(recent_address);
  begin_.Upload(recent_begin_);
}

void DecodeCase::MakeTransforms() {
  const int dim = options_.tile.head_dim;
  if (options_.transforms) {
    for (int h = 0; h < options_.kv_heads; ++h) {
      for (std::vector<float>* all : {&rotation_k_, &rotation_v_}) {
        const std::vector<float> one = RandomRotation(dim, random_);
        all->insert(all->end(), one.begin(), one.end());
      }
    }
    mean_v_ = RandomFloats(static_cast<size_t>(options_.kv_heads) * dim, 0.3 * options_.value_std,
                           random_);
    device_rotation_k_.Upload(rotation_k_);
    device_rotation_v_.Upload(rotation_v_);
    device_mean_.Upload(mean_v_);
  }
  if (options_.offset) {
    position_blocks_ = 3;
    offset_host_ =
        RandomFloats(static_cast<size_t>(batch_) * options_.q_tokens * q_heads() * position_blocks_,
                     8.0, random_);
    device_offset_.Upload(offset_host_);
  }
  if (options_.shift) {
    shift_host_ = RandomFloats(q_heads(), 0.5, random_);
    device_shift_.Upload(shift_host_);
  }
  if (options_.sink_logit) {
    sink_logit_ = RandomFloats(q_heads(), 3.0, random_);
    device_sink_logit_.Upload(sink_logit_);
  }
}

void DecodeCase::SetLengths(const std::vector<SequenceLengths>& sequences) {
  lengths_ = sequences;
  std::vector<int32_t> sink, pages, recent;
  for (const SequenceLengths& s : sequences) {
    sink.push_back(s.sink);
    pages.push_back(s.pages);
    recent.push_back(s.recent);
  }
  sink_tokens_.Upload(sink);
  pages_.Upload(pages);
  recent_tokens_.Upload(recent);
}

DecodeAttentionParams DecodeCase::Params() {
  const int dim = options_.tile.head_dim;
  DecodeAttentionParams p;
  p.shape.tile = options_.tile;
  p.shape.batch = batch_;
  p.shape.max_pages = options_.max_pages;
  p.shape.q_tokens = options_.q_tokens;
  p.shape.kv_heads = options_.kv_heads;
  p.shape.q_heads = q_heads();
  p.shape.batch_invariant = options_.batch_invariant;
  p.lengths = {sink_tokens_.as<int32_t>(), pages_.as<int32_t>(), recent_tokens_.as<int32_t>(),
               begin_.as<int32_t>()};
  p.q = q_.as<Bf16>();
  p.out = out_.as<void>();
  p.out_type = options_.out_type;
  p.lse = lse_.as<float>();
  p.page_address = table_.as<uint64_t>();
  p.page_head_stride = static_cast<int64_t>(options_.tile.int2_bytes());
  p.sink = {sink_address_.as<uint64_t>(), 0, 256 * dim, 2 * dim, 128 * dim};
  p.recent = {recent_address_.as<uint64_t>(), 0, 4 * recent_capacity_ * dim, 2 * dim,
              2 * recent_capacity_ * dim};
  p.recent_capacity = recent_capacity_;
  if (options_.transforms) {
    p.rotation_k = device_rotation_k_.as<float>();
    p.rotation_v = device_rotation_v_.as<float>();
    p.mean_v = device_mean_.as<float>();
  }
  if (options_.offset) p.offset = device_offset_.as<float>();
  p.position_blocks = position_blocks_;
  p.pages_per_position_block = 2;
  if (options_.shift) p.shift = device_shift_.as<float>();
  if (options_.sink_logit) p.sink_logit = device_sink_logit_.as<float>();
  p.soft_cap = options_.soft_cap;
  p.window = options_.window;
  p.plan = plan_.as<void>();
  p.workspace = workspace_.as<void>();
  return p;
}

cudaError_t DecodeCase::Enqueue(cudaStream_t stream) {
  const DecodeAttentionParams p = Params();
  const cudaError_t error =
      PlanDecode(p.shape, p.lengths, p.window, plan_.as<void>(), stream, Tuning());
  return error != cudaSuccess ? error : DecodeAttention(p, stream, Tuning());
}

void DecodeCase::ScaleKeys(int sequence, int page, int head, int token, double nats) {
  const int dim = options_.tile.head_dim;
  const Bf16* q =
      q_host_.data() +
      (static_cast<size_t>(sequence) * options_.q_tokens * q_heads() + head * options_.group) * dim;
  double sum = 0.0;
  for (int i = 0; i < dim; ++i) sum += Bf16ToFloat(q[i]);
  const RowMeta meta = {0, Half(nats * std::sqrt(dim) / sum)};
  for (int y = 0; y < options_.tile.groups(); ++y) {
    WriteMeta(options_.tile, TilePart::kKey, token, y, meta, Tile(sequence, page, head));
  }
}

void DecodeCase::PeakAt(int sequence, int page, int head, int token, double nats) {
  ScaleKeys(sequence, page, head, token, nats);
  arena_.Upload(arena_host_);
}

void DecodeCase::Rise(int sequence, int head, double nats) {
  const int tokens = lengths_[sequence].pages * options_.tile.tokens;
  for (int t = 0; t < tokens; ++t) {
    ScaleKeys(sequence, t / options_.tile.tokens, head, t % options_.tile.tokens,
              nats * t / tokens);
  }
  arena_.Upload(arena_host_);
}

double DecodeCase::PlaceKey(const std::vector<float>& q, const DecodeKey& key,
                            uint8_t* tile) const {
  const TileShape& shape = options_.tile;
  double sum = 0.0, dot = 0.0;
  for (int i = 0; i < shape.head_dim; ++i) {
    const double code = std::clamp(std::round(q[i] / options_.logit_std + 1.5), 0.0, 3.0);
    WriteCode(shape, TilePart::kKey, key.token, i, static_cast<uint8_t>(code), tile);
    sum += q[i];
    dot += q[i] * code;
  }
  const double root = std::sqrt(shape.head_dim);
  const double scale = key.nats * root / (dot - 1.5 * sum);
  const RowMeta meta = {Half(scale), Half(-1.5 * scale)};
  for (int y = 0; y < shape.groups(); ++y) {
    WriteMeta(shape, TilePart::kKey, key.token, y, meta, tile);
  }
  return (Fp16ToFloat(meta.minimum) * sum + Fp16ToFloat(meta.scale) * dot) / root;
}

void DecodeCase::Dominate(int sequence, int head, const std::vector<DecodeKey>& keys) {
  const TileShape& shape = options_.tile;
  const int dim = shape.head_dim;
  std::vector<float> q(dim);
  for (int i = 0; i < options_.q_tokens * options_.group; ++i) {
    const int token = i / options_.group, of_group = i % options_.group;
    Bf16* row =
        q_host_.data() + ((static_cast<size_t>(sequence) * options_.q_tokens + token) * q_heads() +
                          head * options_.group + of_group) *
                             dim;
    for (int j = 0; j < dim; ++j) {
      if (i == 0) q[j] = Bf16ToFloat(row[j]);
      row[j] = Bf16FromFloat(q[j] * (1.0f + i / 64.0f));
    }
  }
  q_.Upload(q_host_);
  for (int page = 0; page < lengths_[sequence].pages; ++page) {
    for (int t = 0; t < shape.tokens; ++t) {
      for (int y = 0; y < shape.groups(); ++y) {
        WriteMeta(shape, TilePart::kKey, t, y, {Half(1e-3), Half(-1.5e-3)},
                  Tile(sequence, page, head));
      }
    }
  }
  double before = 0.0, last = 0.0;
  for (const DecodeKey& key : keys) {
    before = last;
    last = PlaceKey(q, key, Tile(sequence, key.page, head));
  }
  const auto loss = [&](uint16_t scale) {
    const double weight = std::exp(last - before) * Fp16ToFloat(scale);
    return std::abs(Fp16ToFloat(Half(weight)) / weight - 1.0);
  };
  uint16_t worst = 0x3800;  // bit pattern of 0.5
  for (uint16_t scale = 0x3800; scale < 0x3c00; ++scale) {
    if (loss(scale) > loss(worst)) worst = scale;
  }
  const RowMeta meta = {worst, Half(-1.5 * Fp16ToFloat(worst))};
  for (int y = 0; y < shape.groups(); ++y) {
    WriteMeta(shape, TilePart::kValue, keys.back().token, y, meta,
              Tile(sequence, keys.back().page, head));
  }
  arena_.Upload(arena_host_);
}

void DecodeCase::LevelQuery() {
  const float size = static_cast<float>(options_.logit_std);
  for (Bf16& x : q_host_) {
    x = Bf16FromFloat(std::copysign(size, Bf16ToFloat(x)));
  }
  q_.Upload(q_host_);
}

void DecodeCase::PoisonOutputs() {
  out_.Fill(0xff);
  lse_.Fill(0xff);
}

void DecodeCase::Run() {
  PoisonOutputs();
  plan_.Fill(0xff);
  ASSERT_CUDA(Enqueue(nullptr));
  ASSERT_CUDA(cudaDeviceSynchronize());
}

std::vector<float> DecodeCase::Out() const {
  if (options_.out_type == OutType::kF32) return out_.Download<float>();
  std::vector<float> out;
  for (const Bf16 x : out_.Download<Bf16>()) out.push_back(Bf16ToFloat(x));
  return out;
}

AttentionParams DecodeCase::HostParams(int sequence) const {
  const int dim = options_.tile.head_dim;
  AttentionParams p;
  p.shape = options_.tile;
  p.q_tokens = options_.q_tokens;
  p.kv_heads = options_.kv_heads;
  p.q_heads = q_heads();
  p.q = q_host_.data() + static_cast<size_t>(sequence) * p.q_tokens * p.q_heads * dim;
  p.sink_tokens = lengths_[sequence].sink;
  p.sink_k = sink_host_.data() + static_cast<size_t>(sequence) * p.kv_heads * 128 * dim;
  p.sink_v = p.sink_k + 64 * dim;
  p.sink_head_stride = 128 * dim;
  p.sink_token_stride = dim;
  p.pages = lengths_[sequence].pages;
  p.page_head_stride = static_cast<int64_t>(options_.tile.int2_bytes());
  p.recent_tokens = lengths_[sequence].recent;
  p.recent_begin = recent_begin_[sequence];
  p.recent_capacity = recent_capacity_;
  p.recent_k =
      recent_host_.data() + static_cast<size_t>(sequence) * p.kv_heads * 2 * recent_capacity_ * dim;
  p.recent_v = p.recent_k + recent_capacity_ * dim;
  p.recent_head_stride = 2 * recent_capacity_ * dim;
  p.recent_token_stride = dim;
  if (options_.transforms) {
    p.rotation_k = rotation_k_.data();
    p.rotation_v = rotation_v_.data();
    p.mean_v = mean_v_.data();
  }
  if (options_.offset) {
    p.offset = offset_host_.data() +
               static_cast<size_t>(sequence) * p.q_tokens * p.q_heads * position_blocks_;
  }
  p.position_blocks = position_blocks_;
  p.pages_per_position_block = 2;
  if (options_.shift) p.shift = shift_host_.data();
  if (options_.sink_logit) p.sink_logit = sink_logit_.data();
  p.soft_cap = options_.soft_cap;
  p.window = options_.window;
  return p;
}

uint8_t* DecodeCase::Tile(int sequence, int page, int head) {
  return arena_host_.data() + page_offset_[sequence * options_.max_pages + page] +
         head * options_.tile.int2_bytes();
}

template <typename Visit>
void DecodeCase::VisitErrors(int rows_max, const Visit& visit) const {
  const int dim = options_.tile.head_dim, per_sequence = options_.q_tokens * q_heads();
  const int rows = batch_ * per_sequence, step = std::max(1, rows / rows_max);
  const std::vector<float> out = Out(), lse = Lse();
  for (int row = 0; row < rows; row += step) {
    const int sequence = row / per_sequence, t = row % per_sequence / q_heads();
    const SequenceLengths& lengths = lengths_[sequence];
    if (lengths.sink + lengths.pages + lengths.recent == 0) continue;
    AttentionParams p = HostParams(sequence);
    std::vector<uint64_t> address;
    for (int page = 0; page < p.pages; ++page) {
      address.push_back(reinterpret_cast<uint64_t>(
          arena_host_.data() + page_offset_[sequence * options_.max_pages + page]));
    }
    p.page_address = address.data();
    const OracleRow expected = OracleAttend(p, t, row % q_heads());
    double error = 0.0, rounding = 0.0, norm = 0.0;
    for (int i = 0; i < dim; ++i) {
      const double difference = out[static_cast<size_t>(row) * dim + i] - expected.out[i];
      const double rounded = Rounded(options_.out_type, expected.out[i]) - expected.out[i];
      error += difference * difference;
      rounding += rounded * rounded;
      norm += expected.out[i] * expected.out[i];
    }
    visit(std::sqrt(error / norm), std::sqrt(rounding / norm));
    const double lse_error = std::abs(lse[row] - expected.lse);
    if (!(lse_error < 2e-2))
      ADD_FAILURE() << "row " << row << ": lse " << lse[row] << ", not " << expected.lse;
  }
}

double DecodeCase::WorstError(int rows_max) const {
  double worst = 0.0;
  VisitErrors(rows_max, [&](double error, double) {
    if (!(error <= worst)) worst = error;
  });
  return worst;
}

double DecodeCase::WorstOfBound(double bound, int rows_max) const {
  double worst = 0.0;
  VisitErrors(rows_max, [&](double error, double rounding) {
    const double share = error / std::max(bound, 1.02 * rounding);
    if (!(share <= worst)) worst = share;
  });
  return worst;
}

bool Serves(DecodeForm form, const TileShape& tile, int query_rows) {
  if (form != DecodeForm::kClusters) return true;
  int major = 0;
  return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0) == cudaSuccess &&
         major >= 9 && tile.head_dim == 128 && tile.group_size == 128 && query_rows <= 16;
}

}  // namespace crumb::kernels::cuda
