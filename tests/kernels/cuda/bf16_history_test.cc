// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// BF16 history pages, behind INT2 pages or alone: decode and prefill attention over them, and the
// launch that copies evicted windows to them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "gtest/gtest.h"
#include "kernels/attention.h"
#include "kernels/cuda/common/host_oracle.h"
#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/prefill/prefill_attention.h"
#include "kernels/quantize.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/pages/crc32c_oracle.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {
namespace {

constexpr int kRing = 331;

struct Lengths {
  int sink = 0;
  int pages = 0;
  int bf16_pages = 0;
  int recent = 0;
  int fresh = 0;  // prefill: fresh tokens in addition to recent ones
};

struct HistoryOptions {
  TileShape tile;
  int kv_heads = 2;
  int group = 4;
  int q_tokens = 1;  // decode
  float soft_cap = 0.0f;
  int window = 0;
  bool batch_invariant = false;
  DecodeForm form = DecodeForm::kAuto;
  CopyPath copy_path = CopyPath::kAuto;
  PrefillMma mma = PrefillMma::kAuto;
  std::vector<Lengths> sequences;
};

// Random sequences on the device, and their rows on the host for the oracle: there, rows of BF16
// pages come before the recent ones, and fresh ones after them.
class HistoryCase {
 public:
  explicit HistoryCase(const HistoryOptions& options)
      : o_(options),
        dim_(options.tile.head_dim),
        batch_(static_cast<int>(options.sequences.size())),
        random_(11 + options.group) {
    for (const Lengths& l : o_.sequences) {
      columns_ = std::max(columns_, l.pages + l.bf16_pages);
      fresh_max_ = std::max(fresh_max_, l.fresh);
      fresh_ += l.fresh;
    }
    const size_t heads = o_.kv_heads;
    int2_.resize(o_.tile.int2_bytes() * heads * batch_ * columns_);
    for (size_t at = 0; at < int2_.size(); at += o_.tile.int2_bytes()) {
      RandomTile(o_.tile, 1.0, 1.0, random_, int2_.data() + at);
    }
    bf16_ = RandomRows(TileElements() * heads * batch_ * columns_, 1.0, random_);
    sinks_ = RandomRows(TileElements() * heads * batch_, 1.0, random_);
    rings_ = RandomRows(size_t{2} * kRing * dim_ * heads * batch_, 1.0, random_);
    k_ = RandomRows(heads * dim_ * fresh_, 1.0, random_);
    v_ = RandomRows(heads * dim_ * fresh_, 1.0, random_);
    for (std::vector<float>* matrices : {&rotation_k_, &rotation_v_}) {
      for (size_t head = 0; head < heads; ++head) {
        const std::vector<float> one = RandomRotation(dim_, random_);
        matrices->insert(matrices->end(), one.begin(), one.end());
      }
    }
    // Pages of both kinds have slots in random order.
    for (std::vector<int>* slots : {&int2_slot_, &bf16_slot_}) {
      slots->resize(batch_ * columns_);
      std::iota(slots->begin(), slots->end(), 0);
      std::shuffle(slots->begin(), slots->end(), random_);
    }
    Upload();
  }

  // Returns the worst ||out - oracle|| / ||oracle|| of a row.
  double Decode() {
    DecodeAttentionParams p;
    p.shape.tile = o_.tile;
    p.shape.batch = batch_;
    p.shape.max_pages = columns_;
    p.shape.q_tokens = o_.q_tokens;
    p.shape.batch_invariant = o_.batch_invariant;
    const DecodeTuning tuning = {.form = o_.form, .copy_path = o_.copy_path};
    p.lengths = {.sink_tokens = sink_tokens_.as<int32_t>(),
                 .pages = pages_.as<int32_t>(),
                 .recent_tokens = recent_tokens_.as<int32_t>(),
                 .recent_begin = recent_begin_.as<int32_t>(),
                 .bf16_pages = bf16_pages_.as<int32_t>()};
    Fill(p);
    const size_t rows = size_t{1} * batch_ * o_.q_tokens * q_heads();
    q_ = RandomRows(rows * dim_, 1.0, random_);
    const DeviceBuffer q(q_), plan(DecodePlanBytes(p.shape, tuning));
    DeviceBuffer workspace(DecodeWorkspaceBytes(p.shape, tuning)), out(rows * dim_ * 4),
        lse(rows * 4);
    workspace.Fill(0);
    p.q = q.as<Bf16>();
    p.out = out.as<float>();
    p.lse = lse.as<float>();
    p.out_type = OutType::kF32;
    p.plan = plan.as<void>();
    p.workspace = workspace.as<void>();
    EXPECT_EQ(PlanDecode(p.shape, p.lengths, p.window, plan.as<void>(), nullptr, tuning),
              cudaSuccess);
    EXPECT_EQ(DecodeAttention(p, nullptr, tuning), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<int> first;
    for (int s = 0; s < batch_; ++s) first.push_back(s * o_.q_tokens);
    return Worst(out.Download<float>(), lse.Download<float>(), first,
                 std::vector<int>(batch_, o_.q_tokens), std::vector<int>(batch_, 0));
  }

  double Prefill() {
    PrefillAttentionParams p;
    p.shape.tile = o_.tile;
    p.shape.batch = batch_;
    p.shape.max_pages = columns_;
    p.shape.fresh_max = fresh_max_;
    std::vector<int32_t> first, count;
    for (const Lengths& l : o_.sequences) {
      first.push_back(first.empty() ? 0 : first.back() + count.back());
      count.push_back(l.fresh);
    }
    const DeviceBuffer fresh_begin(first), fresh_tokens(count), k(k_), v(v_);
    p.lengths = {.sink_tokens = sink_tokens_.as<int32_t>(),
                 .pages = pages_.as<int32_t>(),
                 .recent_tokens = recent_tokens_.as<int32_t>(),
                 .recent_begin = recent_begin_.as<int32_t>(),
                 .fresh_tokens = fresh_tokens.as<int32_t>(),
                 .fresh_begin = fresh_begin.as<int32_t>(),
                 .bf16_pages = bf16_pages_.as<int32_t>()};
    Fill(p);
    const size_t rows = size_t{1} * fresh_ * q_heads();
    q_ = RandomRows(rows * dim_, 1.0, random_);
    const DeviceBuffer q(q_), out(rows * dim_ * 4), lse(rows * 4);
    p.q = q.as<Bf16>();
    p.k = k.as<Bf16>();
    p.v = v.as<Bf16>();
    p.token_stride = int64_t{o_.kv_heads} * dim_;
    p.head_stride = dim_;
    p.out = out.as<float>();
    p.lse = lse.as<float>();
    p.out_type = OutType::kF32;
    EXPECT_EQ(PrefillAttention(p, nullptr, o_.mma), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return Worst(out.Download<float>(), lse.Download<float>(), {first.begin(), first.end()},
                 {count.begin(), count.end()}, {count.begin(), count.end()});
  }

 private:
  size_t TileElements() const { return size_t{128} * dim_; }
  int q_heads() const { return o_.kv_heads * o_.group; }
  int Begin(int sequence) const { return sequence * 97 % kRing; }

  void Upload() {
    device_int2_.Upload(int2_);
    device_bf16_.Upload(bf16_);
    device_sinks_.Upload(sinks_);
    device_rings_.Upload(rings_);
    device_rotation_k_.Upload(rotation_k_);
    device_rotation_v_.Upload(rotation_v_);
    std::vector<uint64_t> table, sink_address, ring_address;
    std::vector<int32_t> sink, pages, bf16_pages, recent, begin;
    for (int s = 0; s < batch_; ++s) {
      const Lengths& l = o_.sequences[s];
      for (int column = 0; column < columns_; ++column) {
        const size_t at = size_t{1} * s * columns_ + column;
        const bool int2 = column < l.pages, exists = column < l.pages + l.bf16_pages;
        table.push_back(
            !exists ? 8
            : int2  ? device_int2_.address() + o_.tile.int2_bytes() * o_.kv_heads * int2_slot_[at]
                    : device_bf16_.address() + o_.tile.bf16_bytes() * o_.kv_heads * bf16_slot_[at]);
      }
      sink_address.push_back(device_sinks_.address() + o_.tile.bf16_bytes() * o_.kv_heads * s);
      ring_address.push_back(device_rings_.address() + size_t{4} * kRing * dim_ * o_.kv_heads * s);
      sink.push_back(l.sink);
      pages.push_back(l.pages);
      bf16_pages.push_back(l.bf16_pages);
      recent.push_back(l.recent);
      begin.push_back(Begin(s));
    }
    table_.Upload(table);
    sink_address_.Upload(sink_address);
    ring_address_.Upload(ring_address);
    sink_tokens_.Upload(sink);
    pages_.Upload(pages);
    bf16_pages_.Upload(bf16_pages);
    recent_tokens_.Upload(recent);
    recent_begin_.Upload(begin);
  }

  template <typename Params>
  void Fill(Params& p) const {
    p.shape.kv_heads = o_.kv_heads;
    p.shape.q_heads = q_heads();
    p.page_address = table_.as<uint64_t>();
    p.page_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
    p.sink = {sink_address_.as<uint64_t>(), 0, 256 * dim_, 2 * dim_, 128 * dim_};
    p.recent = {ring_address_.as<uint64_t>(), 0, 4 * kRing * dim_, 2 * dim_, 2 * kRing * dim_};
    p.recent_capacity = kRing;
    p.rotation_k = device_rotation_k_.as<float>();
    p.rotation_v = device_rotation_v_.as<float>();
    p.soft_cap = o_.soft_cap;
    p.window = o_.window;
  }

  // Returns the rows [kv_heads, K and V, tokens, dim] of a sequence behind its INT2 pages.
  std::vector<Bf16> RowsBehind(int sequence, int first_fresh, int fresh) const {
    const Lengths& l = o_.sequences[sequence];
    std::vector<Bf16> rows;
    const auto add = [&](const Bf16* row) { rows.insert(rows.end(), row, row + dim_); };
    for (int head = 0; head < o_.kv_heads; ++head) {
      for (int value = 0; value < 2; ++value) {
        for (int t = 0; t < 64 * l.bf16_pages; ++t) {
          const int slot = bf16_slot_[size_t{1} * sequence * columns_ + l.pages + t / 64];
          add(&bf16_[TileElements() * (size_t{1} * slot * o_.kv_heads + head) +
                     (64 * value + t % 64) * dim_]);
        }
        for (int t = 0; t < l.recent; ++t) {
          const int slot = (Begin(sequence) + t) % kRing;
          add(&rings_[((size_t{2} * (sequence * o_.kv_heads + head) + value) * kRing + slot) *
                      dim_]);
        }
        for (int t = 0; t < fresh; ++t) {
          add(&(value == 0 ? k_ : v_)[(size_t{1} * (first_fresh + t) * o_.kv_heads + head) * dim_]);
        }
      }
    }
    return rows;
  }

  // Returns the worst error. Query t of sequence s is row first[s] + t of q; the last `fresh` of
  // `count` queries have rows of their own.
  double Worst(const std::vector<float>& out, const std::vector<float>& lse,
               const std::vector<int>& first, const std::vector<int>& count,
               const std::vector<int>& fresh) const {
    double worst = 0.0;
    for (int s = 0; s < batch_; ++s) {
      const Lengths& l = o_.sequences[s];
      if (l.sink + l.pages + l.bf16_pages + l.recent + fresh[s] == 0) continue;
      const std::vector<Bf16> rows = RowsBehind(s, first[s], fresh[s]);
      const int tokens = 64 * l.bf16_pages + l.recent + fresh[s];
      AttentionParams p;
      p.shape = o_.tile;
      p.q_tokens = count[s];
      p.kv_heads = o_.kv_heads;
      p.q_heads = q_heads();
      p.q = q_.data() + size_t{1} * first[s] * q_heads() * dim_;
      p.sink_tokens = l.sink;
      p.sink_k = &sinks_[TileElements() * o_.kv_heads * s];
      p.sink_v = p.sink_k + 64 * dim_;
      p.sink_head_stride = 128 * dim_;
      p.sink_token_stride = dim_;
      std::vector<uint64_t> pages;
      for (int page = 0; page < l.pages; ++page) {
        const int slot = int2_slot_[size_t{1} * s * columns_ + page];
        pages.push_back(
            reinterpret_cast<uint64_t>(&int2_[o_.tile.int2_bytes() * o_.kv_heads * slot]));
      }
      p.pages = l.pages;
      p.page_address = pages.data();
      p.page_head_stride = static_cast<int64_t>(o_.tile.int2_bytes());
      p.recent_tokens = p.recent_capacity = tokens;
      p.recent_k = rows.data();
      p.recent_v = p.recent_k + int64_t{tokens} * dim_;
      p.recent_head_stride = int64_t{2} * tokens * dim_;
      p.recent_token_stride = dim_;
      p.rotation_k = rotation_k_.data();
      p.rotation_v = rotation_v_.data();
      p.soft_cap = o_.soft_cap;
      p.window = o_.window;
      const int step = std::max(1, count[s] / 9);
      for (int t = 0; t < count[s]; t += step) {
        for (int head = t / step % o_.group; head < q_heads(); head += o_.group) {
          const OracleRow expected = OracleAttend(p, t, head);
          const size_t row = (size_t{1} * first[s] + t) * q_heads() + head;
          double error = 0.0, norm = 0.0;
          for (int i = 0; i < dim_; ++i) {
            error += std::pow(out[row * dim_ + i] - expected.out[i], 2);
            norm += std::pow(expected.out[i], 2);
          }
          const double relative = std::sqrt(error / norm);
          if (!(relative <= worst)) worst = relative;
          EXPECT_NEAR(lse[row], expected.lse, 1e-2) << "sequence " << s << " row " << t;
        }
      }
    }
    return worst;
  }

  const HistoryOptions o_;
  const int dim_, batch_;
  int columns_ = 1, fresh_max_ = 1, fresh_ = 0;
  std::mt19937 random_;
  std::vector<uint8_t> int2_;
  std::vector<Bf16> bf16_, sinks_, rings_, q_, k_, v_;
  std::vector<float> rotation_k_, rotation_v_;
  std::vector<int> int2_slot_, bf16_slot_;  // slot of (sequence, page)
  DeviceBuffer device_int2_, device_bf16_, device_sinks_, device_rings_, device_rotation_k_,
      device_rotation_v_;
  DeviceBuffer table_, sink_address_, ring_address_;
  DeviceBuffer sink_tokens_, pages_, bf16_pages_, recent_tokens_, recent_begin_;
};

// Sequences have INT2 pages before their BF16 pages, BF16 pages alone, many or none, and padding
// lies between.
std::vector<Lengths> Ragged() {
  return {{64, 0, 3, 256, 70}, {64, 9, 0, 300, 33}, {0, 0, 0, 0, 0},   {64, 0, 29, 65, 40},
          {64, 5, 7, 40, 90},  {64, 0, 1, 17, 5},   {33, 0, 0, 9, 31}, {64, 12, 17, 319, 1}};
}

const TileShape kTiles[] = {{64, 128, 128}, {64, 128, 64}, {64, 64, 64}, {64, 256, 128}};

TEST(Bf16History, DecodeAgreesWithTheOracle) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& tile : kTiles) {
    for (const int group : {1, 4, 7}) {
      if (tile.head_dim == 256 && group == 7) continue;
      for (const CopyPath path : {CopyPath::kAuto, CopyPath::kAsync16}) {
        HistoryOptions options;
        options.tile = tile;
        options.group = group;
        options.copy_path = path;
        if (path == CopyPath::kAsync16) options.form = DecodeForm::kPlanned;
        options.sequences = Ragged();
        EXPECT_LE(HistoryCase(options).Decode(), 5e-4) << tile.head_dim << " group " << group;
      }
    }
  }
}

TEST(Bf16History, DecodeOfDraftsCapsAndWindows) {
  CRUMB_NEEDS_DEVICE();
  for (int mask = 0; mask < 8; ++mask) {
    HistoryOptions options;
    options.q_tokens = (mask & 1) != 0 ? 3 : 1;
    options.soft_cap = (mask & 2) != 0 ? 3.0f : 0.0f;
    options.window = (mask & 4) != 0 ? 500 : 0;
    options.batch_invariant = mask % 3 == 0;
    options.sequences = Ragged();
    EXPECT_LE(HistoryCase(options).Decode(), 5e-4) << "mask " << mask;
  }
}

// In clusters warps are divided by how much of a sequence is BF16.
TEST(Bf16History, DecodeByClusters) {
  CRUMB_NEEDS_DEVICE();
  int major = 0;
  ASSERT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major < 9) GTEST_SKIP() << "needs compute capability 9.0, for clusters";
  for (const int group : {1, 4, 7, 12, 16}) {
    for (int mask = 0; mask < 4; ++mask) {
      HistoryOptions options;
      options.group = group;
      options.form = DecodeForm::kClusters;
      options.soft_cap = (mask & 1) != 0 ? 3.0f : 0.0f;
      options.window = (mask & 2) != 0 ? 500 : 0;
      options.sequences = Ragged();
      EXPECT_LE(HistoryCase(options).Decode(), 5e-4) << group << " heads, mask " << mask;
    }
  }
}

// One long sequence is cut over the whole device; many short ones share blocks.
TEST(Bf16History, DecodeOfOneAndOfMany) {
  CRUMB_NEEDS_DEVICE();
  for (const DecodeForm form : {DecodeForm::kAuto, DecodeForm::kPlanned}) {
    HistoryOptions one;
    one.kv_heads = 1;
    one.form = form;
    one.sequences = {{64, 0, 400, 300, 0}};
    EXPECT_LE(HistoryCase(one).Decode(), 5e-4);
    one.sequences = {{64, 150, 250, 300, 0}};
    EXPECT_LE(HistoryCase(one).Decode(), 5e-4);
  }
  HistoryOptions many;
  many.kv_heads = 8;
  for (int i = 0; i < 40; ++i) many.sequences.push_back({64, i % 3, i % 5, 20 + i, 0});
  EXPECT_LE(HistoryCase(many).Decode(), 5e-4);
}

TEST(Bf16History, PrefillAgreesWithTheOracle) {
  CRUMB_NEEDS_DEVICE();
  for (const TileShape& tile : kTiles) {
    for (const PrefillMma mma : {PrefillMma::kAuto, PrefillMma::kWarp}) {
      for (const int window : {0, 700}) {
        HistoryOptions options;
        options.tile = tile;
        options.mma = mma;
        options.window = window;
        options.sequences = Ragged();
        EXPECT_LE(HistoryCase(options).Prefill(), 5e-4) << tile.head_dim << " window " << window;
      }
    }
  }
}

// BF16 tiles are the rows, bit by bit; checksums and rows that are not finite are reported.
TEST(Bf16History, WindowsAreCopiedAndSummed) {
  CRUMB_NEEDS_DEVICE();
  constexpr int kLayers = 3, kHeads = 2, kWindows = 4;
  for (const int dim : {64, 128, 256}) {
    std::mt19937 random(dim);
    const size_t ring = size_t{2} * kRing * dim;  // elements of one (window, layer, head)
    std::vector<Bf16> rows = RandomRows(ring * kLayers * kHeads * kWindows, 1.0, random);
    const int begins[kWindows] = {0, 300, kRing - 1, 64};
    const auto row = [&](int w, int tile, int value, int t) {
      return &rows[ring * (w * kLayers * kHeads + tile) +
                   (size_t{1} * value * kRing + (begins[w] + t) % kRing) * dim];
    };
    row(1, 3, 0, 63)[dim - 1].bits = 0x7f80;
    row(3, 5, 1, 0)[0].bits = 0xffc1;
    const TileShape tile{64, dim, 64};
    const size_t tile_bytes = tile.bf16_bytes(), page_bytes = tile_bytes * kLayers * kHeads;
    const DeviceBuffer device_rows(rows), pages(page_bytes * kWindows);
    std::vector<uint64_t> from, to;
    for (int w = 0; w < kWindows; ++w) {
      from.push_back(device_rows.address() + 2 * ring * kLayers * kHeads * w);
      to.push_back(pages.address() + page_bytes * (kWindows - 1 - w));
    }
    const int windows = kWindows - (dim == 64 ? 1 : 0);  // then the last window must not be touched
    const DeviceBuffer count(std::vector<int32_t>{windows}), ring_address(from), tile_address(to),
        begin(std::vector<int32_t>(begins, begins + kWindows));
    const DeviceBuffer status(std::vector<uint32_t>{0, kStatusSaturated, 0, 0}),
        sums(std::vector<uint32_t>(kWindows * kLayers * kHeads, 7));
    EvictParams p;
    p.tile = tile;
    p.format = PageFormat::kBf16;
    p.layers = kLayers;
    p.kv_heads = kHeads;
    p.windows_max = kWindows;
    p.windows = count.as<int32_t>();
    p.ring_address = ring_address.as<uint64_t>();
    p.ring_begin = begin.as<int32_t>();
    p.ring_capacity = kRing;
    p.ring_head_stride = static_cast<int64_t>(2 * ring);
    p.ring_layer_stride = p.ring_head_stride * kHeads;
    p.ring_token_stride = 2 * dim;
    p.ring_v_offset = int64_t{2} * kRing * dim;
    p.tile_address = tile_address.as<uint64_t>();
    p.tile_head_stride = static_cast<int64_t>(tile_bytes);
    p.tile_layer_stride = p.tile_head_stride * kHeads;
    p.status = status.as<uint32_t>();
    p.checksums = sums.as<uint32_t>();
    ASSERT_CUDA(EvictWindows(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    const auto bytes = pages.Download<uint8_t>();
    const auto got_sums = sums.Download<uint32_t>(), got_status = status.Download<uint32_t>();
    for (int w = 0; w < kWindows; ++w) {
      for (int i = 0; i < kLayers * kHeads; ++i) {
        const uint8_t* got = &bytes[page_bytes * (kWindows - 1 - w) + tile_bytes * i];
        if (w >= windows) {
          EXPECT_EQ(std::count(got, got + tile_bytes, 0xff), static_cast<int64_t>(tile_bytes));
          EXPECT_EQ(got_sums[w * kLayers * kHeads + i], 7u);
          continue;
        }
        int differ = 0;
        for (int value = 0; value < 2; ++value) {
          for (int t = 0; t < 64; ++t) {
            differ +=
                std::memcmp(got + (64 * value + t) * 2 * dim, row(w, i, value, t), 2 * dim) != 0;
          }
        }
        EXPECT_EQ(differ, 0) << "window " << w << " tile " << i;
        EXPECT_EQ(got_sums[w * kLayers * kHeads + i], Crc32cOracle(got, tile_bytes));
      }
    }
    const uint32_t last = windows == kWindows ? kStatusNonFinite : 0;
    EXPECT_EQ(got_status, (std::vector<uint32_t>{0, kStatusSaturated | kStatusNonFinite, 0, last}));
  }
}

}  // namespace
}  // namespace crumb::kernels::cuda
