// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/codec_workload.h"

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>

#include "kernels/attention.h"
#include "kernels/bf16.h"
#include "kernels/quantize.h"

namespace crumb::bench {
namespace {

using kernels::AttentionParams;
using kernels::Bf16;
using kernels::CpuIsa;
using kernels::PageFormat;
using kernels::TileShape;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<uint8_t, Free>;

Buffer Allocate(size_t bytes) {
  constexpr size_t kAlignment = 4096;
  const size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  Buffer buffer(static_cast<uint8_t*>(std::aligned_alloc(kAlignment, rounded)));
  if (buffer != nullptr) std::memset(buffer.get(), 1, rounded);
  return buffer;
}

// Returns the CPU time of this thread, which includes waiting for memory but not other processes.
double ThreadSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

double Seconds(const std::function<void()>& work) {
  const double start = ThreadSeconds();
  work();
  return ThreadSeconds() - start;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Reads the buffer once. Eight sums keep additions from waiting for one another, and prefetches
// make the memory the limit.
uint64_t SumOf(const uint8_t* buffer, size_t bytes) {
  constexpr size_t kAheadWords = 256;
  uint64_t sums[8] = {};
  const auto* words = reinterpret_cast<const uint64_t*>(buffer);
  for (size_t i = 0; i + 8 <= bytes / 8; i += 8) {
    __builtin_prefetch(words + i + kAheadWords);
    for (int k = 0; k < 8; ++k) sums[k] += words[i + k];
  }
  uint64_t sum = 0;
  for (const uint64_t s : sums) sum += s;
  return sum;
}

std::vector<Bf16> RandomRows(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<Bf16> rows(count);
  for (Bf16& x : rows) x = kernels::Bf16FromFloat(normal(random));
  return rows;
}

// Returns a dense orthogonal matrix per KV head, the reflection I - 2 w w' / w'w.
std::vector<float> Reflections(int heads, int dim) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> matrices;
  for (int head = 0; head < heads; ++head) {
    std::vector<float> w(dim);
    float norm = 0.0f;
    for (float& x : w) {
      x = normal(random);
      norm += x * x;
    }
    for (int i = 0; i < dim; ++i) {
      for (int j = 0; j < dim; ++j) {
        matrices.push_back((i == j ? 1.0f : 0.0f) - 2.0f * w[i] * w[j] / norm);
      }
    }
  }
  return matrices;
}

// Layers of history pages of one format at shuffled addresses.
class History {
 public:
  History(const CodecOptions& options, PageFormat format, int context) : format_(format) {
    const TileShape& shape = options.shape;
    tile_bytes_ = shape.bytes(format);
    pages_ = context / shape.tokens;
    const size_t page_bytes = tile_bytes_ * options.kv_heads;
    const size_t layer_bytes = page_bytes * pages_;
    layers_ = static_cast<int>((options.footprint_bytes + layer_bytes - 1) / layer_bytes);
    const size_t slots = static_cast<size_t>(pages_) * layers_;
    memory_ = Allocate(slots * page_bytes);
    for (size_t slot = 0; slot < slots; ++slot) {
      addresses_.push_back(reinterpret_cast<uint64_t>(memory_.get() + slot * page_bytes));
    }
    std::shuffle(addresses_.begin(), addresses_.end(), std::mt19937(11));
    Fill(shape, slots * options.kv_heads);
  }

  int layers() const { return layers_; }
  size_t layer_bytes(int kv_heads) const { return tile_bytes_ * kv_heads * pages_; }

  // Sets the pages of `params` to those of `layer`.
  void Use(int layer, AttentionParams* params) const {
    params->history_format = format_;
    params->pages = pages_;
    params->page_address = addresses_.data() + static_cast<size_t>(layer) * pages_;
    params->page_head_stride = static_cast<int64_t>(tile_bytes_);
  }

 private:
  static constexpr int kDistinctTiles = 16;

  void Fill(const TileShape& shape, size_t tiles) {
    const size_t elements = static_cast<size_t>(shape.tokens) * shape.head_dim;
    Buffer patterns = Allocate(kDistinctTiles * tile_bytes_);
    for (int i = 0; i < kDistinctTiles; ++i) {
      const std::vector<Bf16> rows = RandomRows(2 * elements, i);
      uint8_t* tile = patterns.get() + i * tile_bytes_;
      if (format_ == PageFormat::kBf16) {
        std::memcpy(tile, rows.data(), tile_bytes_);
        continue;
      }
      kernels::QuantizeParams params;
      params.shape = shape;
      params.k = rows.data();
      params.v = rows.data() + elements;
      params.k_stride = params.v_stride = shape.head_dim;
      params.tile = tile;
      kernels::QuantizeTile(params);
    }
    for (size_t i = 0; i < tiles; ++i) {
      std::memcpy(memory_.get() + i * tile_bytes_,
                  patterns.get() + i % kDistinctTiles * tile_bytes_, tile_bytes_);
    }
  }

  PageFormat format_;
  size_t tile_bytes_ = 0;
  int pages_ = 0;
  int layers_ = 0;
  Buffer memory_;
  std::vector<uint64_t> addresses_;
};

// Times attention over both formats alternately, for one context and several head counts.
class AttentionBench {
 public:
  AttentionBench(const CodecOptions& options, int context)
      : options_(options),
        context_(context),
        int2_(options, PageFormat::kInt2, context),
        bf16_(options, PageFormat::kBf16, context),
        rotations_(Reflections(options.kv_heads, options.shape.head_dim)) {}

  void Run(CpuIsa isa, int heads, double read_gb_per_s, std::vector<CodecRow>* rows) {
    const int dim = options_.shape.head_dim, q_heads = heads * options_.kv_heads;
    const std::vector<Bf16> q = RandomRows(static_cast<size_t>(q_heads) * dim, 3);
    std::vector<float> out(q.size());
    AttentionParams params;
    params.shape = options_.shape;
    params.kv_heads = options_.kv_heads;
    params.q_heads = q_heads;
    params.q = q.data();
    params.out = out.data();
    params.rotation_k = params.rotation_v = rotations_.data();
    const Buffer workspace = Allocate(kernels::AttentionWorkspaceBytes(params));
    std::vector<double> int2_seconds, bf16_seconds, ratios;
    for (int round = 0; round < options_.rounds; ++round) {
      bf16_seconds.push_back(SecondsPerLayer(bf16_, &params, workspace.get()));
      int2_seconds.push_back(SecondsPerLayer(int2_, &params, workspace.get()));
      ratios.push_back(int2_seconds.back() / bf16_seconds.back());
    }
    AddRow(isa, "bf16", heads, Median(bf16_seconds), bf16_, 0.0, read_gb_per_s, rows);
    AddRow(isa, "int2", heads, Median(int2_seconds), int2_, Median(ratios), read_gb_per_s, rows);
  }

 private:
  double SecondsPerLayer(const History& history, AttentionParams* params, void* workspace) const {
    return Seconds([&] {
             for (int layer = 0; layer < history.layers(); ++layer) {
               history.Use(layer, params);
               kernels::Attend(*params, 0, options_.kv_heads, workspace);
             }
           }) /
           history.layers();
  }

  void AddRow(CpuIsa isa, const char* format, int heads, double seconds, const History& history,
              double ratio, double read_gb_per_s, std::vector<CodecRow>* rows) const {
    CodecRow row;
    row.isa = std::string(kernels::CpuIsaName(isa));
    row.operation = "attention";
    row.format = format;
    row.context = context_;
    row.heads_per_kv_head = heads;
    row.microseconds = seconds * 1e6;
    row.gb_per_s = static_cast<double>(history.layer_bytes(options_.kv_heads)) / seconds / 1e9;
    row.read_fraction = row.gb_per_s / read_gb_per_s;
    row.time_over_bf16 = ratio;
    rows->push_back(row);
  }

  const CodecOptions& options_;
  int context_;
  History int2_;
  History bf16_;
  std::vector<float> rotations_;
};

double MeasureRead(const CodecOptions& options) {
  const Buffer buffer = Allocate(options.footprint_bytes);
  std::vector<double> rates;
  volatile uint64_t sink = 0;
  for (int round = 0; round < options.rounds + 1; ++round) {
    const double seconds =
        Seconds([&] { sink = sink + SumOf(buffer.get(), options.footprint_bytes); });
    rates.push_back(static_cast<double>(options.footprint_bytes) / seconds / 1e9);
  }
  return Median(rates);
}

// Times `work`, which processes one tile, and repeats it until the time can be measured.
CodecRow TileRow(const CodecOptions& options, CpuIsa isa, const char* operation,
                 double read_gb_per_s, const std::function<void()>& work) {
  constexpr int kTiles = 64;
  std::vector<double> seconds;
  seconds.reserve(static_cast<size_t>(options.rounds));
  for (int round = 0; round < options.rounds; ++round) {
    seconds.push_back(Seconds([&] {
                        for (int i = 0; i < kTiles; ++i) work();
                      }) /
                      kTiles);
  }
  CodecRow row;
  row.isa = std::string(kernels::CpuIsaName(isa));
  row.operation = operation;
  row.microseconds = Median(seconds) * 1e6;
  row.gb_per_s = static_cast<double>(options.shape.bf16_bytes()) / Median(seconds) / 1e9;
  row.read_fraction = row.gb_per_s / read_gb_per_s;
  return row;
}

void RunTiles(const CodecOptions& options, CpuIsa isa, double read_gb_per_s,
              std::vector<CodecRow>* rows) {
  const TileShape& shape = options.shape;
  const size_t elements = static_cast<size_t>(shape.tokens) * shape.head_dim;
  const std::vector<Bf16> window = RandomRows(2 * elements, 5);
  const std::vector<float> rotation = Reflections(1, shape.head_dim);
  const Buffer tile = Allocate(shape.int2_bytes());
  std::vector<float> k(elements), v(elements);
  kernels::QuantizeParams params;
  params.shape = shape;
  params.k = window.data();
  params.v = window.data() + elements;
  params.k_stride = params.v_stride = shape.head_dim;
  params.k_transform = {rotation.data(), nullptr, 0.96f};
  params.v_transform = {rotation.data(), nullptr, 0.92f};
  params.tile = tile.get();
  rows->push_back(
      TileRow(options, isa, "quantize", read_gb_per_s, [&] { kernels::QuantizeTile(params); }));
  rows->push_back(TileRow(options, isa, "dequantize", read_gb_per_s,
                          [&] { kernels::DequantizeTile(shape, tile.get(), k.data(), v.data()); }));
}

std::vector<CpuIsa> IsasOf(const CodecOptions& options) {
  if (!options.isas.empty()) return options.isas;
  return {CpuIsa::kPortable, CpuIsa::kAvx2, CpuIsa::kAvx512, CpuIsa::kAvx512Vnni};
}

}  // namespace

std::vector<CodecRow> RunCodecWorkload(const CodecOptions& options) {
  const CpuIsa before = kernels::ActiveCpuIsa();
  std::vector<CodecRow> rows(1);
  const double read = MeasureRead(options);
  rows[0].isa = "plain";
  rows[0].operation = "read";
  rows[0].gb_per_s = read;
  rows[0].read_fraction = 1.0;
  for (const CpuIsa isa : IsasOf(options)) {
    if (kernels::SelectCpuIsa(isa)) RunTiles(options, isa, read, &rows);
  }
  for (const int context : options.contexts) {
    kernels::SelectCpuIsa(before);
    AttentionBench bench(options, context);
    for (const CpuIsa isa : IsasOf(options)) {
      if (!kernels::SelectCpuIsa(isa)) continue;
      for (const int heads : options.heads_per_kv_head) bench.Run(isa, heads, read, &rows);
    }
  }
  kernels::SelectCpuIsa(before);
  return rows;
}

}  // namespace crumb::bench
