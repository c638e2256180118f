// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// The checks of the host on a step over blocks in device memory; block_attention_suite.cc has the
// results.
#include "client/gpu/device/owned.h"
#include "crumb/device_block_attention.h"
#include "gtest/gtest.h"
#include "tests/client/gpu/device_run.h"
#include "tests/client/gpu/pools/pool_player.h"

namespace crumb::client {
namespace {

// A step of one request without tokens, whose tables and rows are zeros.
class DeviceBlockStepsTest : public testing::Test {
 protected:
  void SetUp() override {
    device_ = Platform().open(0);
    if (device_ == nullptr) GTEST_SKIP() << "needs a CUDA device";
    const WorkerOptions options = SmallWorkerOptions();
    auto opened =
        DeviceBlockAttention::Open(options, {.requests = 2, .tokens = 64, .pages = 8}, *device_);
    ASSERT_TRUE(opened.ok()) << opened.status();
    attention_ = std::move(opened).value();
    stream_ = NewStream(*device_).value();
    memory_ = NewDeviceBuffer(*device_, kBytes).value();
    ASSERT_TRUE(device_->Clear(memory_.get(), kBytes, stream_.get()).ok());
    auto* const zeros = reinterpret_cast<std::byte*>(memory_.get());
    const auto* const ids = reinterpret_cast<const int32_t*>(zeros);
    stride_ = int64_t{attention_->geometry().tile_bytes} * options.kv_heads;
    pool_ = {
        .history = zeros, .sink = zeros, .recent = zeros, .block_stride = stride_, .blocks = 1};
    batch_ = {.requests = 1,
              .query_start = ids,
              .lengths = ids,
              .history = {ids, 64},
              .sink = {ids, 64},
              .recent = {ids, 64}};
    const int64_t row = int64_t{options.q_heads} * options.head_dim;
    auto* const rows = reinterpret_cast<kernels::Bf16*>(zeros + kBytes / 2);
    rows_ = {.q = rows,
             .k = rows,
             .v = rows,
             .out = rows,
             .q_stride = row,
             .k_stride = row,
             .v_stride = row,
             .out_stride = row};
  }
  void TearDown() override {
    if (device_ != nullptr) Drain(*device_, stream_.get());
  }

  absl::Status Prepare(const BlockPool& pool, const BlockStepShape& shape) {
    return attention_->Prepare(pool, batch_, shape, stream_.get());
  }
  absl::StatusCode Attend(const BlockPool& pool) {
    return attention_->Attend(0, pool, rows_, stream_.get()).code();
  }

  static constexpr size_t kBytes = 1 << 20;
  static constexpr BlockStepShape kShape = {
      .requests = 1, .decodes = 0, .tokens = 8, .tokens_max = 8};
  std::shared_ptr<Device> device_;
  OwnedStream stream_;
  DeviceBuffer memory_;
  std::unique_ptr<DeviceBlockAttention> attention_;
  BlockPool pool_;
  int64_t stride_ = 0;
  BlockBatch batch_;
  FreshRows rows_;
};

TEST_F(DeviceBlockStepsTest, AStepThatWasNotPreparedIsNotAttended) {
  EXPECT_EQ(Attend(pool_), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Prepare(pool_, kShape).ok());
  EXPECT_EQ(Attend(pool_), absl::StatusCode::kOk);
  // The step before the failed Prepare is over.
  EXPECT_EQ(Prepare(pool_, {.requests = 3, .decodes = 0, .tokens = 8, .tokens_max = 8}).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Attend(pool_), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(Prepare(pool_, kShape).ok());
  EXPECT_EQ(Attend(pool_), absl::StatusCode::kOk);
}

TEST_F(DeviceBlockStepsTest, PoolsBeginAtMultiplesOf128Bytes) {
  ASSERT_TRUE(Prepare(pool_, kShape).ok());
  for (std::byte* BlockPool::*group : {&BlockPool::history, &BlockPool::sink, &BlockPool::recent}) {
    for (const int offset : {1, 16, 64}) {
      BlockPool pool = pool_;
      pool.*group += offset;
      EXPECT_EQ(Attend(pool), absl::StatusCode::kInvalidArgument) << offset;
      EXPECT_EQ(Prepare(pool, kShape).code(), absl::StatusCode::kInvalidArgument) << offset;
      ASSERT_TRUE(Prepare(pool_, kShape).ok());
    }
  }
  BlockPool pool = pool_;
  pool.block_stride += 64;
  EXPECT_EQ(Prepare(pool, kShape).code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace crumb::client
