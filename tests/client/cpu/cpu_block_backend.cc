// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "gtest/gtest.h"
#include "tests/client/block_engine.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

// BlockAttention over a pool in host memory.
class CpuBlockBackend final : public BlockBackend {
 public:
  CpuBlockBackend(const WorkerOptions& options, int blocks)
      : options_(options),
        layer_stride_(int64_t{BlockGeometryOf(options).tile_bytes} * options.kv_heads),
        block_stride_(layer_stride_ * options.layers),
        memory_(block_stride_ * blocks, std::byte{0xa5}) {
    auto opened = BlockAttention::Open(options);
    EXPECT_TRUE(opened.ok()) << opened.status();
    attention_ = std::move(opened).value();
  }

  void Write(int64_t at, std::span<const std::byte> bytes) override {
    std::copy(bytes.begin(), bytes.end(), memory_.begin() + at);
  }
  std::vector<std::byte> Read(int64_t at, size_t bytes) override {
    return {memory_.begin() + at, memory_.begin() + at + static_cast<int64_t>(bytes)};
  }

  absl::Status Run(const BlockStepInput& step, std::vector<std::vector<Bf16>>& out) override {
    constexpr int64_t kColumns = BlockStepInput::kColumns;
    const BlockBatch batch = {.requests = step.requests(),
                              .query_start = step.query_start.data(),
                              .lengths = step.lengths.data(),
                              .history = {step.history.data(), kColumns},
                              .sink = {step.sink.data(), kColumns},
                              .recent = {step.recent.data(), kColumns}};
    for (int layer = 0; layer < options_.layers; ++layer) {
      std::byte* const base = memory_.data() + layer_stride_ * layer;
      const BlockPool pool = {.history = base,
                              .sink = base,
                              .recent = base,
                              .block_stride = block_stride_,
                              .blocks = static_cast<int64_t>(memory_.size()) / block_stride_};
      const int64_t q_stride = int64_t{options_.q_heads} * options_.head_dim;
      const int64_t kv_stride = int64_t{options_.kv_heads} * options_.head_dim;
      out[layer].resize(step.q[layer].size());
      const absl::Status status = attention_->Attend(layer, pool, batch,
                                                     {.q = step.q[layer].data(),
                                                      .k = step.k[layer].data(),
                                                      .v = step.v[layer].data(),
                                                      .out = out[layer].data(),
                                                      .q_stride = q_stride,
                                                      .k_stride = kv_stride,
                                                      .v_stride = kv_stride,
                                                      .out_stride = q_stride});
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  const WorkerOptions options_;
  const int64_t layer_stride_;
  const int64_t block_stride_;
  std::vector<std::byte> memory_;
  std::unique_ptr<BlockAttention> attention_;
};

}  // namespace

absl::Status BlockBackendStatus() { return absl::OkStatus(); }

std::unique_ptr<BlockBackend> NewBlockBackend(const WorkerOptions& options, int blocks) {
  return std::make_unique<CpuBlockBackend>(options, blocks);
}

double BlockErrorMax() { return 3e-3; }

}  // namespace crumb::client
