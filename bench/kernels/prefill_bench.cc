// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/kernels/prefill_bench.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "bench/kernels/device_memory.h"
#include "bench/kernels/device_rates.h"
#include "bench/kernels/random_data.h"
#include "kernels/bf16.h"
#include "kernels/cuda/common/host_oracle.h"
#include "kernels/cuda/prefill/prefill_attention.h"

namespace crumb::bench {
namespace {

using kernels::Bf16;
using kernels::cuda::PrefillAttentionParams;
using kernels::cuda::PrefillMma;

constexpr int kTokens = 64;
constexpr int kCheckedRows = 4;

// The inputs of one workload in device memory.
struct Inputs {
  explicit Inputs(const PrefillWorkload& w)
      : tile{kTokens, w.head_dim, w.group_size},
        pages((w.cached - kTokens) / kTokens),
        page_bytes(w.kv_heads * tile.int2_bytes()),
        tiles(Allocate<uint8_t>(pages * page_bytes)),
        q(Allocate<Bf16>(static_cast<size_t>(w.fresh) * w.q_heads * w.head_dim)),
        kv(Allocate<Bf16>(static_cast<size_t>(w.fresh) * w.kv_heads * 2 * w.head_dim)),
        sink(Allocate<Bf16>(static_cast<size_t>(w.kv_heads) * 2 * kTokens * w.head_dim)),
        out(Allocate<Bf16>(static_cast<size_t>(w.fresh) * w.q_heads * w.head_dim)) {
    FillTiles(tile, static_cast<size_t>(pages) * w.kv_heads, 11, tiles.get());
    FillBf16(static_cast<size_t>(w.fresh) * w.q_heads * w.head_dim, 12, q.get());
    FillBf16(static_cast<size_t>(w.fresh) * w.kv_heads * 2 * w.head_dim, 13, kv.get());
    FillBf16(static_cast<size_t>(w.kv_heads) * 2 * kTokens * w.head_dim, 14, sink.get());
    std::mt19937 random(15);
    for (int i = 0; i < pages; ++i) slot.push_back(i);
    std::shuffle(slot.begin(), slot.end(), random);
    std::vector<uint64_t> address;
    for (const int s : slot) {
      address.push_back(reinterpret_cast<uint64_t>(tiles.get()) + s * page_bytes);
    }
    page_address = Upload(address);
    for (int h = 0; h < 2 * w.kv_heads; ++h) {
      const std::vector<float> one = RandomRotation(w.head_dim, random);
      rotations_host.insert(rotations_host.end(), one.begin(), one.end());
    }
    rotations = Upload(rotations_host);
    means_host.assign(static_cast<size_t>(w.kv_heads) * w.head_dim, 0.02f);
    means = Upload(means_host);
    lengths = Upload(std::vector<int32_t>{kTokens, pages, 0, 0, w.fresh, 0});
    sink_address = Upload(std::vector<uint64_t>{reinterpret_cast<uint64_t>(sink.get())});
  }

  PrefillAttentionParams Params(const PrefillWorkload& w) const {
    PrefillAttentionParams p;
    p.shape.tile = tile;
    p.shape.max_pages = pages;
    p.shape.fresh_max = w.fresh;
    p.shape.kv_heads = w.kv_heads;
    p.shape.q_heads = w.q_heads;
    const int32_t* l = lengths.get();
    p.lengths = {l, l + 1, l + 2, l + 3, l + 4, l + 5};
    p.q = q.get();
    p.out = out.get();
    p.k = kv.get();
    p.v = kv.get() + w.head_dim;
    p.token_stride = w.kv_heads * 2 * w.head_dim;
    p.head_stride = 2 * w.head_dim;
    p.page_address = page_address.get();
    p.page_head_stride = static_cast<int64_t>(tile.int2_bytes());
    p.sink = {sink_address.get(), 0, 4 * kTokens * w.head_dim, 2 * w.head_dim,
              2 * kTokens * w.head_dim};
    p.recent = p.sink;
    p.rotation_k = rotations.get();
    p.rotation_v = rotations.get() + static_cast<size_t>(w.kv_heads) * w.head_dim * w.head_dim;
    p.mean_v = means.get();
    p.soft_cap = w.soft_cap;
    return p;
  }

  kernels::TileShape tile;
  int pages;
  size_t page_bytes;
  Device<uint8_t> tiles;
  Device<Bf16> q, kv, sink, out;
  std::vector<int> slot;
  Device<uint64_t> page_address, sink_address;
  std::vector<float> rotations_host, means_host;
  Device<float> rotations, means;
  Device<int32_t> lengths;
};

// Returns the largest error of a few rows, compared with the definition in double precision.
double CheckRows(const PrefillWorkload& w, const Inputs& in) {
  const size_t row_elements = static_cast<size_t>(w.q_heads) * w.head_dim;
  const std::vector<uint8_t> tiles = Download(in.tiles.get(), in.pages * in.page_bytes);
  const std::vector<Bf16> q = Download(in.q.get(), w.fresh * row_elements),
                          out = Download(in.out.get(), w.fresh * row_elements),
                          kv = Download(in.kv.get(), size_t{2} * w.fresh * w.kv_heads * w.head_dim),
                          sink = Download(in.sink.get(),
                                          size_t{2} * w.kv_heads * kTokens * w.head_dim);
  std::vector<uint64_t> address;
  for (const int s : in.slot) {
    address.push_back(reinterpret_cast<uint64_t>(tiles.data() + s * in.page_bytes));
  }
  kernels::AttentionParams p;
  p.shape = in.tile;
  p.q_tokens = w.fresh;
  p.kv_heads = w.kv_heads;
  p.q_heads = w.q_heads;
  p.q = q.data();
  p.sink_tokens = kTokens;
  p.sink_k = sink.data();
  p.sink_v = sink.data() + kTokens * w.head_dim;
  p.sink_head_stride = 2 * kTokens * w.head_dim;
  p.sink_token_stride = w.head_dim;
  p.pages = in.pages;
  p.page_address = address.data();
  p.page_head_stride = static_cast<int64_t>(in.tile.int2_bytes());
  p.recent_tokens = p.recent_capacity = w.fresh;
  p.recent_k = kv.data();
  p.recent_v = kv.data() + w.head_dim;
  p.recent_head_stride = 2 * w.head_dim;
  p.recent_token_stride = w.kv_heads * 2 * w.head_dim;
  p.rotation_k = in.rotations_host.data();
  p.rotation_v =
      in.rotations_host.data() + static_cast<size_t>(w.kv_heads) * w.head_dim * w.head_dim;
  p.mean_v = in.means_host.data();
  p.soft_cap = w.soft_cap;
  double worst = 0.0;
  for (int i = 0; i < kCheckedRows; ++i) {
    const int token = i * (w.fresh - 1) / (kCheckedRows - 1);
    const int head = i * (w.q_heads - 1) / (kCheckedRows - 1);
    const kernels::cuda::OracleRow expected = kernels::cuda::OracleAttend(p, token, head);
    const Bf16* row = out.data() + token * row_elements + static_cast<size_t>(head) * w.head_dim;
    double error = 0.0, norm = 0.0;
    for (int j = 0; j < w.head_dim; ++j) {
      const double difference = kernels::Bf16ToFloat(row[j]) - expected.out[j];
      error += difference * difference;
      norm += expected.out[j] * expected.out[j];
    }
    const double relative = std::sqrt(error / norm);
    if (!(relative <= worst)) worst = relative;
  }
  return worst;
}

}  // namespace

PrefillResult RunPrefill(const PrefillWorkload& w) {
  const Inputs in(w);
  const PrefillAttentionParams p = in.Params(w);
  Check(cudaMemset(p.out, 0xff, static_cast<size_t>(w.fresh) * w.q_heads * w.head_dim * 2),
        "poison");
  PrefillResult result;
  result.us = TimeGraph([&](cudaStream_t stream) {
    Check(kernels::cuda::PrefillAttention(p, stream, w.mma), "prefill");
  });
  const double pairs = static_cast<double>(w.fresh) * (w.cached + 0.5 * w.fresh);
  result.tflops = 4.0 * w.head_dim * w.q_heads * pairs / result.us * 1e-6;
  result.rel_error = CheckRows(w, in);
  return result;
}

std::vector<PrefillWorkload> StandardPrefillWorkloads() {
  return {{"4k over 32k", 32, 8, 4096, 32768, 128},
          {"4k over 100k", 32, 8, 4096, 102400, 128},
          {"8k over 32k", 32, 8, 8192, 32768, 128},
          {"2k over 32k", 32, 8, 2048, 32768, 128},
          {"1k over 32k", 32, 8, 1024, 32768, 128},
          {"512 over 32k", 32, 8, 512, 32768, 128},
          {"4k over 32k, 64 heads", 64, 8, 4096, 32768, 128},
          {"4k over 32k, G 64", 32, 8, 4096, 32768, 64},
          {"4k over 32k, warp", 32, 8, 4096, 32768, 128, 128, 0.0f, PrefillMma::kWarp},
          {"4k over 100k, warp", 32, 8, 4096, 102400, 128, 128, 0.0f, PrefillMma::kWarp},
          {"4k over 32k, cap", 32, 8, 4096, 32768, 128, 128, 30.0f},
          {"4k over 32k, G 64, warp", 32, 8, 4096, 32768, 64, 128, 0.0f, PrefillMma::kWarp},
          {"4k over 32k, G 32", 32, 8, 4096, 32768, 32},
          {"4k over 32k, d 64", 32, 8, 4096, 32768, 64, 64},
          {"4k over 100k, d 64", 32, 8, 4096, 102400, 64, 64},
          {"4k over 32k, d 64, G 32", 32, 8, 4096, 32768, 32, 64},
          {"4k over 32k, d 64, cap", 32, 8, 4096, 32768, 64, 64, 30.0f},
          {"4k over 32k, d 64, warp", 32, 8, 4096, 32768, 64, 64, 0.0f, PrefillMma::kWarp},
          {"4k over 32k, d 256", 32, 8, 4096, 32768, 128, 256},
          {"4k over 100k, d 256", 32, 8, 4096, 102400, 128, 256},
          {"4k over 32k, d 256, G 64", 32, 8, 4096, 32768, 64, 256},
          {"4k over 32k, d 256, cap", 32, 8, 4096, 32768, 128, 256, 30.0f},
          {"4k over 32k, d 256, warp", 32, 8, 4096, 32768, 128, 256, 0.0f, PrefillMma::kWarp}};
}

}  // namespace crumb::bench
