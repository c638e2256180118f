// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/pages/pages.h"

#include <algorithm>
#include <random>
#include <vector>

#include "kernels/bf16.h"
#include "tests/kernels/cuda/device_buffer.h"
#include "tests/kernels/cuda/random_inputs.h"

namespace crumb::kernels::cuda {
namespace {

struct Lengths {
  int sink, pages, recent, begin, count;
};

// Appends on the device and in a model of the memory, and compares all bytes of both.
class AppendCase {
 public:
  AppendCase(int head_dim, int kv_heads, int q_tokens, std::vector<Lengths> lengths)
      : dim_(head_dim), heads_(kv_heads), tokens_(q_tokens), lengths_(lengths) {
    const size_t rows = lengths_.size() * tokens_ * heads_;
    std::normal_distribution<float> normal;
    for (std::vector<uint16_t>* x : {&k_, &v_}) {
      for (size_t i = 0; i < rows * dim_; ++i) {
        x->push_back(Bf16FromFloat(normal(random_)).bits);
      }
    }
    const size_t elements = lengths_.size() * heads_ * 2 * dim_;
    sink_ = RandomRows(elements * 64, 1.0, random_);
    recent_ = RandomRows(elements * kCapacity, 1.0, random_);
  }

  void RunAndCompare() {
    DeviceBuffer k(k_), v(v_), sink(sink_), recent(recent_);
    std::vector<int32_t> columns[5];
    std::vector<uint64_t> sink_address, recent_address;
    for (size_t s = 0; s < lengths_.size(); ++s) {
      const Lengths& l = lengths_[s];
      const int32_t values[] = {l.sink, l.pages, l.recent, l.begin, l.count};
      for (int i = 0; i < 5; ++i) columns[i].push_back(values[i]);
      const bool padding = l.sink + l.pages + l.recent == 0;
      sink_address.push_back(padding ? 8 : sink.address() + s * heads_ * 4 * 64 * dim_);
      recent_address.push_back(padding ? 8 : recent.address() + s * heads_ * 4 * kCapacity * dim_);
    }
    DeviceBuffer device[5];
    for (int i = 0; i < 5; ++i) device[i].Upload(columns[i]);
    DeviceBuffer device_sink(sink_address), device_recent(recent_address);
    AppendParams p;
    p.batch = static_cast<int>(lengths_.size());
    p.q_tokens = tokens_;
    p.kv_heads = heads_;
    p.head_dim = dim_;
    p.k = k.as<void>();
    p.v = v.as<void>();
    p.head_stride = dim_;
    p.token_stride = heads_ * dim_;
    p.sequence_stride = tokens_ * p.token_stride;
    p.lengths = {device[0].as<int32_t>(), device[1].as<int32_t>(), device[2].as<int32_t>(),
                 device[3].as<int32_t>()};
    p.new_tokens = device[4].as<int32_t>();
    p.sink = {device_sink.as<uint64_t>(), 0, 4 * 64 * dim_, 2 * dim_, 2 * 64 * dim_};
    p.recent = {device_recent.as<uint64_t>(), 0, 4 * kCapacity * dim_, 2 * dim_,
                2 * kCapacity * dim_};
    p.recent_capacity = kCapacity;
    ASSERT_CUDA(AppendRows(p, nullptr));
    ASSERT_CUDA(cudaDeviceSynchronize());
    Model();
    EXPECT_TRUE(Same(sink.Download<Bf16>(), sink_));
    EXPECT_TRUE(Same(recent.Download<Bf16>(), recent_));
  }

 private:
  static constexpr int kCapacity = 71;

  static bool Same(const std::vector<Bf16>& a, const std::vector<Bf16>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](Bf16 x, Bf16 y) { return x.bits == y.bits; });
  }

  void Model() {
    for (size_t s = 0; s < lengths_.size(); ++s) {
      const Lengths& l = lengths_[s];
      if (l.sink + l.pages + l.recent == 0) continue;
      for (int t = 0; t < l.count; ++t) {
        // Number of tokens, in sink and ring together, from this one to the newest.
        const int behind = l.count - t;
        const bool ring = behind <= l.recent;
        const int slot =
            ring ? (l.begin + l.recent - behind) % kCapacity : l.sink - (behind - l.recent);
        for (int h = 0; h < heads_; ++h) {
          for (int part = 0; part < 2; ++part) {
            const std::vector<uint16_t>& from = part == 0 ? k_ : v_;
            std::vector<Bf16>& to = ring ? recent_ : sink_;
            const size_t slots = ring ? kCapacity : 64;
            for (int i = 0; i < dim_; ++i) {
              to[(((s * heads_ + h) * 2 + part) * slots + slot) * dim_ + i] =
                  Bf16{from[((s * tokens_ + t) * heads_ + h) * dim_ + i]};
            }
          }
        }
      }
    }
  }

  const int dim_, heads_, tokens_;
  const std::vector<Lengths> lengths_;
  std::mt19937 random_{5};
  std::vector<uint16_t> k_, v_;
  std::vector<Bf16> sink_, recent_;
};

// sink, pages, recent, ring begin, new rows
std::vector<Lengths> Ragged(int q_tokens) {
  std::vector<Lengths> lengths = {{64, 0, 30, 50, q_tokens}, {0, 0, 0, 0, q_tokens},
                                  {64, 3, 64, 70, q_tokens}, {q_tokens, 0, 0, 0, q_tokens},
                                  {64, 9, 71, 12, q_tokens}, {40, 0, 0, 3, q_tokens}};
  if (q_tokens > 1) {
    // the last one is appended to the ring, the others to the sink
    lengths.push_back({64, 0, 1, 70, q_tokens});
    lengths.push_back({64, 1, 20, 69, q_tokens - 1});  // fewer rows than q_tokens
    lengths.push_back({64, 1, 20, 69, 0});
  }
  return lengths;
}

TEST(AppendRows, WritesTheNewRowsAndNothingElse) {
  CRUMB_NEEDS_DEVICE();
  for (const int dim : {64, 128, 256}) {
    for (const int q_tokens : {1, 2, 5, 8, 20}) {
      AppendCase(dim, q_tokens == 5 ? 3 : 2, q_tokens, Ragged(q_tokens)).RunAndCompare();
    }
  }
}

TEST(AppendRows, RefusesSizesItDoesNotServe) {
  AppendParams p;
  p.q_tokens = kAppendTokensMax + 1;
  EXPECT_EQ(AppendRows(p, nullptr), cudaErrorInvalidValue);
  p.q_tokens = 1;
  p.head_dim = 100;
  EXPECT_EQ(AppendRows(p, nullptr), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace crumb::kernels::cuda
