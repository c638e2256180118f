// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <string>

#include "client/gpu/device/owned.h"
#include "crumb/device_block_attention.h"
#include "gtest/gtest.h"
#include "tests/client/block_engine.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/pools/pool_player.h"

namespace crumb::client {
namespace {

using kernels::Bf16;

// DeviceBlockAttention over a pool in the memory of the platform's first device. Its steps end with
// a request of the padding block. Every other step passes requests that decode as prompts, and
// bounds that are larger than its sizes.
class DeviceBlockBackend final : public BlockBackend {
 public:
  DeviceBlockBackend(const WorkerOptions& options, int blocks)
      : options_(options),
        layer_stride_(int64_t{BlockGeometryOf(options).tile_bytes} * options.kv_heads),
        block_stride_(layer_stride_ * options.layers),
        blocks_(blocks),
        device_(Platform().open(0)),
        stream_(NewStream(*device_).value()),
        memory_(NewDeviceBuffer(*device_, block_stride_ * blocks).value()) {
    const DeviceBlockLimits limits = {
        .requests = 5, .tokens = 1024, .pages = 64, .padding_block = kPaddingBlock};
    auto opened = DeviceBlockAttention::Open(options, limits, *device_);
    EXPECT_TRUE(opened.ok()) << opened.status();
    attention_ = std::move(opened).value();
    Write(0, std::vector<std::byte>(block_stride_ * blocks, std::byte{0xa5}));
  }
  ~DeviceBlockBackend() override { Drain(*device_, stream_.get()); }

  void Write(int64_t at, std::span<const std::byte> bytes) override {
    Upload(memory_.get() + at, bytes.data(), bytes.size());
    Drain(*device_, stream_.get());
  }
  std::vector<std::byte> Read(int64_t at, size_t bytes) override {
    std::vector<std::byte> read(bytes);
    Download(memory_.get() + at, read.data(), bytes);
    return read;
  }

  absl::Status Run(const BlockStepInput& given, std::vector<std::vector<Bf16>>& out) override {
    BlockStepInput step = given;
    Pad(step);
    const std::array<DeviceBuffer, 5> tables = {Sent(step.query_start), Sent(step.lengths),
                                                Sent(step.history), Sent(step.sink),
                                                Sent(step.recent)};
    const auto ids = [&](int i) { return reinterpret_cast<const int32_t*>(tables[i].get()); };
    const BlockBatch batch = {.requests = step.requests(),
                              .query_start = ids(0),
                              .lengths = ids(1),
                              .history = {ids(2), BlockStepInput::kColumns},
                              .sink = {ids(3), BlockStepInput::kColumns},
                              .recent = {ids(4), BlockStepInput::kColumns}};
    absl::Status status =
        attention_->Prepare(PoolOf(options_.layers - 1), batch, ShapeOf(step), stream_.get());
    if (!status.ok()) return status;
    for (int layer = 0; layer < options_.layers; ++layer) {
      status = RunLayer(layer, step, out[layer]);
      if (!status.ok()) return status;
    }
    status = attention_->TakeFault();
    if (!status.ok()) ExpectNan(given, status, out);
    return status;
  }

 private:
  static constexpr int32_t kPaddingBlock = 1 << 20;

  // Expects NaN in all outputs of the request that `fault` names, and in none of the others. If
  // tokens are not in order, all requests are at fault.
  static void ExpectNan(const BlockStepInput& step, const absl::Status& fault,
                        const std::vector<std::vector<Bf16>>& out) {
    int at_fault = -1;
    ASSERT_EQ(std::sscanf(std::string(fault.message()).c_str(), "request %d of a step", &at_fault),
              1);
    const bool in_order = step.query_start[0] == 0 && std::ranges::is_sorted(step.query_start);
    for (const std::vector<Bf16>& layer : out) {
      const size_t elements = layer.size() / step.query_start.back();
      for (int r = 0; r < step.requests(); ++r) {
        const bool expected = !in_order || r == at_fault;
        const size_t end = std::max(0, step.query_start[r + 1]) * elements;
        for (size_t i = std::max(0, step.query_start[r]) * elements; i < end; ++i) {
          ASSERT_EQ((layer[i].bits & 0x7fff) > 0x7f80, expected)
              << "request " << r << " element " << i << ": " << fault;
        }
      }
    }
  }

  // Adds a request that takes no part.
  static void Pad(BlockStepInput& step) {
    step.query_start.push_back(step.query_start.back());
    step.lengths.push_back(0);
    for (auto* table : {&step.history, &step.sink, &step.recent}) {
      table->resize(table->size() + BlockStepInput::kColumns, kPaddingBlock);
    }
  }

  BlockStepShape ShapeOf(const BlockStepInput& step) {
    BlockStepShape shape;
    shape.requests = step.requests();
    shape.tokens = step.query_start.back();
    const bool apart = ++steps_ % 3 != 0;
    while (apart && shape.decodes < shape.requests &&
           step.query_start[shape.decodes + 1] == shape.decodes + 1) {
      ++shape.decodes;
    }
    // A captured step counts its padding among the requests that decode.
    if (apart && shape.decodes == shape.requests - 1) shape.decodes = shape.requests;
    for (int i = 0; i < shape.requests; ++i) {
      shape.tokens_max = std::max(shape.tokens_max, step.query_start[i + 1] - step.query_start[i]);
    }
    if (!apart) {
      shape.tokens = std::min(shape.tokens + 3, 1024);
      shape.tokens_max = std::min(shape.tokens_max + 2, shape.tokens);
    }
    return shape;
  }

  BlockPool PoolOf(int layer) const {
    auto* const base = reinterpret_cast<std::byte*>(memory_.get()) + layer_stride_ * layer;
    return {.history = base,
            .sink = base,
            .recent = base,
            .block_stride = block_stride_,
            .blocks = blocks_};
  }

  absl::Status RunLayer(int layer, const BlockStepInput& step, std::vector<Bf16>& out) {
    // K and V lie in one tensor of rows of both, as engines have them.
    const size_t row = static_cast<size_t>(options_.kv_heads) * options_.head_dim;
    const size_t tokens = step.k[layer].size() / row;
    std::vector<Bf16> both(3 * row * tokens);
    for (size_t t = 0; t < tokens; ++t) {
      std::copy_n(&step.k[layer][t * row], row, &both[3 * t * row]);
      std::copy_n(&step.v[layer][t * row], row, &both[(3 * t + 2) * row]);
    }
    // Queries behind the last token are read where bounds are larger than the step.
    std::vector<Bf16> queries = step.q[layer];
    const size_t elements = queries.size();
    queries.resize(elements + 3 * static_cast<size_t>(options_.q_heads) * options_.head_dim);
    const DeviceBuffer q = Sent(queries), kv = Sent(both), got = Sent(queries);
    const int64_t q_stride = int64_t{options_.q_heads} * options_.head_dim;
    const auto* const k = reinterpret_cast<const Bf16*>(kv.get());
    const absl::Status status = attention_->Attend(layer, PoolOf(layer),
                                                   {.q = reinterpret_cast<const Bf16*>(q.get()),
                                                    .k = k,
                                                    .v = k + 2 * row,
                                                    .out = reinterpret_cast<Bf16*>(got.get()),
                                                    .q_stride = q_stride,
                                                    .k_stride = static_cast<int64_t>(3 * row),
                                                    .v_stride = static_cast<int64_t>(3 * row),
                                                    .out_stride = q_stride},
                                                   stream_.get());
    out.resize(elements);
    Download(got.get(), out.data(), elements * sizeof(Bf16));
    return status;
  }

  template <typename Element>
  DeviceBuffer Sent(const std::vector<Element>& from) {
    DeviceBuffer to =
        NewDeviceBuffer(*device_, std::max<size_t>(1, from.size() * sizeof(Element))).value();
    Upload(to.get(), from.data(), from.size() * sizeof(Element));
    return to;
  }
  void Upload(DeviceAddress to, const void* from, size_t bytes) {
    if (bytes == 0) return;
    const PinnedBuffer staged = NewPinnedBuffer(*device_, bytes).value();
    std::memcpy(staged.get(), from, bytes);
    const DeviceCopy copy{to, reinterpret_cast<uint64_t>(staged.get()), bytes};
    EXPECT_TRUE(device_->ToDevice({&copy, 1}, stream_.get()).ok());
    Drain(*device_, stream_.get());
  }
  void Download(DeviceAddress from, void* to, size_t bytes) {
    if (bytes == 0) return;
    const PinnedBuffer staged = NewPinnedBuffer(*device_, bytes).value();
    const DeviceCopy copy{reinterpret_cast<uint64_t>(staged.get()), from, bytes};
    EXPECT_TRUE(device_->ToHost({&copy, 1}, stream_.get()).ok());
    Drain(*device_, stream_.get());
    std::memcpy(to, staged.get(), bytes);
  }

  const WorkerOptions options_;
  const int64_t layer_stride_;
  const int64_t block_stride_;
  const int64_t blocks_;
  const std::shared_ptr<Device> device_;
  const OwnedStream stream_;
  const DeviceBuffer memory_;
  std::unique_ptr<DeviceBlockAttention> attention_;
  int steps_ = 0;
};

}  // namespace

absl::Status BlockBackendStatus() {
  return Platform().open(0) == nullptr ? absl::UnavailableError("needs a CUDA device")
                                       : absl::OkStatus();
}

std::unique_ptr<BlockBackend> NewBlockBackend(const WorkerOptions& options, int blocks) {
  return std::make_unique<DeviceBlockBackend>(options, blocks);
}

double BlockErrorMax() { return 3e-3 + Platform().error_max; }

}  // namespace crumb::client
