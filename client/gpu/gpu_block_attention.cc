// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/gpu_block_attention.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <string>
#include <utility>

#include "common/page_format.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

namespace cuda = kernels::cuda;

using cuda::BlockStatus;

namespace {

constexpr size_t kArrayAlignment = 256;  // alignment of arrays in one allocation

// Takes arrays from one allocation. With a base of 0 it only counts the bytes.
class ArrayTaker {
 public:
  explicit ArrayTaker(DeviceAddress base) : base_(base) {}
  template <typename Element>
  void Take(size_t count, Element** array) {
    *array = reinterpret_cast<Element*>(base_ + bytes_);
    bytes_ += (count * sizeof(Element) + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment;
  }
  size_t bytes() const { return bytes_; }

 private:
  DeviceAddress base_;
  size_t bytes_ = 0;
};

}  // namespace

absl::Status DeviceBlockLimits::Validate() const {
  const std::pair<const char*, std::pair<int, int>> bounds[] = {
      {"requests", {requests, 16384}}, {"tokens", {tokens, 1 << 20}}, {"pages", {pages, 1 << 20}}};
  for (const auto& [name, value] : bounds) {
    if (value.first >= 1 && value.first <= value.second) continue;
    return absl::InvalidArgumentError(
        fmt::format("{} must be 1 to {}, is {}", name, value.second, value.first));
  }
  return absl::OkStatus();
}

absl::StatusOr<DeviceBuffer> GpuBlockAttention::NewBuffer(size_t bytes) {
  device_bytes_ += bytes;
  return NewDeviceBuffer(device_, bytes);
}

size_t GpuBlockAttention::TakeTables(DeviceAddress base) {
  const size_t decodes = std::bit_ceil(static_cast<unsigned>(limits_.requests));
  const size_t entries = decodes + cuda::BlockGroups(limits_.tokens, limits_.requests);
  const size_t windows = cuda::BlockWindows(limits_.tokens, limits_.requests);
  ArrayTaker taker(base);
  taker.Take(limits_.requests, &tables_.requests);
  for (int32_t** array :
       {&tables_.request, &tables_.sink_tokens, &tables_.pages, &tables_.recent_tokens,
        &tables_.fresh_tokens, &tables_.fresh_begin, &tables_.fresh_row}) {
    taker.Take(entries, array);
  }
  taker.Take(entries, &tables_.sink_address);
  taker.Take(entries, &tables_.recent_address);
  taker.Take(entries * limits_.pages, &tables_.page_address);
  taker.Take(1, &tables_.windows);
  taker.Take(windows, &tables_.window_address);
  taker.Take(windows, &tables_.tile_address);
  taker.Take(windows, &tables_.position_block);
  taker.Take(std::max(entries, windows), &zeros_);
  return taker.bytes();
}

cuda::DecodeShape GpuBlockAttention::DecodeShapeOf(int batch) const {
  return {.tile = options_.tile_shape(),
          .batch = batch,
          .max_pages = limits_.pages,
          .q_tokens = 1,
          .kv_heads = options_.own_kv_heads(),
          .q_heads = options_.own_q_heads(),
          .window_tokens_max = cuda::RequestSlots(geometry_),
          .batch_invariant = false};
}

absl::Status GpuBlockAttention::AllocateDecode(DeviceStream stream) {
  for (int batch = 1;; batch *= 2) {
    DecodeSize size;
    size.shape = DecodeShapeOf(batch);
    if (!device_.kernels().DecodeSupported(size.shape)) {
      return absl::InvalidArgumentError(
          fmt::format("decode attention does not serve {} query heads over {} KV heads of {} "
                      "channels",
                      options_.own_q_heads(), options_.own_kv_heads(), options_.head_dim));
    }
    CRUMB_ASSIGN_OR_RETURN(size.plans, DecodePlans::Create(device_, options_, size.shape));
    device_bytes_ += size.plans.bytes();
    const size_t bytes = device_.kernels().DecodeWorkspaceBytes(size.shape);
    CRUMB_ASSIGN_OR_RETURN(size.workspace, NewBuffer(bytes));
    CRUMB_RETURN_IF_ERROR(device_.Clear(size.workspace.get(), bytes, stream));
    decode_.push_back(std::move(size));
    if (batch >= limits_.requests) return absl::OkStatus();
  }
}

absl::Status GpuBlockAttention::Allocate() {
  if (!device_.kernels().Supports(options_.tile_shape())) {
    return absl::InvalidArgumentError(
        fmt::format("the device's kernels do not serve head_dim {} and group_size {}",
                    options_.head_dim, options_.group_size));
  }
  CRUMB_ASSIGN_OR_RETURN(constants_, DeviceConstants::Upload(device_, options_));
  CRUMB_ASSIGN_OR_RETURN(const OwnedStream stream, NewStream(device_));
  const size_t table_bytes = TakeTables(0);
  CRUMB_ASSIGN_OR_RETURN(table_memory_, NewBuffer(table_bytes));
  TakeTables(table_memory_.get());
  CRUMB_RETURN_IF_ERROR(device_.Clear(table_memory_.get(), table_bytes, stream.get()));
  CRUMB_ASSIGN_OR_RETURN(row_memory_, NewBuffer(2 * v_offset()));
  if (constants_->mean_k_columns(0) != nullptr) {
    const size_t rows = size_t{1} * limits_.tokens * options_.own_q_heads();
    CRUMB_ASSIGN_OR_RETURN(offset_memory_,
                           NewBuffer(sizeof(float) * rows * options_.rotations.position_blocks()));
  }
  CRUMB_RETURN_IF_ERROR(AllocateDecode(stream.get()));
  CRUMB_ASSIGN_OR_RETURN(status_, NewPinnedBuffer(device_, sizeof(BlockStatus)));
  *reinterpret_cast<BlockStatus*>(status_.get()) = {};
  CRUMB_ASSIGN_OR_RETURN(const OwnedEvent done, NewEvent(device_));
  CRUMB_RETURN_IF_ERROR(device_.Record(done.get(), stream.get()));
  return device_.Synchronize(done.get());
}

absl::Status GpuBlockAttention::Check(const BlockPool& pool, const BlockBatch& batch,
                                      const BlockStepShape& shape) const {
  CRUMB_RETURN_IF_ERROR(CheckBlockPool(pool, geometry_, options_.own_kv_heads()));
  uint64_t bits = static_cast<uint64_t>(pool.block_stride);
  for (const std::byte* base : {pool.history, pool.sink, pool.recent}) {
    bits |= reinterpret_cast<uint64_t>(base);
  }
  if (bits % kTileAlignment != 0) {
    return absl::InvalidArgumentError(
        fmt::format("the pool's groups and its block_stride must be multiples of {} bytes: history "
                    "{}, sink {}, recent {}, block_stride {}",
                    kTileAlignment, fmt::ptr(pool.history), fmt::ptr(pool.sink),
                    fmt::ptr(pool.recent), pool.block_stride));
  }
  if (shape.requests < 1 || shape.requests > limits_.requests || batch.requests < shape.requests ||
      shape.decodes < 0 || shape.decodes > shape.requests || shape.tokens < 1 ||
      shape.tokens > limits_.tokens || shape.tokens_max < 1 || shape.tokens_max > shape.tokens) {
    return absl::InvalidArgumentError(fmt::format(
        "a step of {} requests, {} of which decode, with {} fresh tokens, at most {} in one: there "
        "is room for {} requests and {} tokens",
        shape.requests, shape.decodes, shape.tokens, shape.tokens_max, limits_.requests,
        limits_.tokens));
  }
  if (batch.sink.stride < geometry_.sink_blocks || batch.recent.stride < geometry_.recent_blocks) {
    return absl::InvalidArgumentError("the tables of sink or recent blocks are too narrow");
  }
  return absl::OkStatus();
}

cuda::PlanBlocksParams GpuBlockAttention::PlanOf(const BlockPool& pool) const {
  cuda::PlanBlocksParams params;
  params.geometry = geometry_;
  params.tables = tables_;
  params.requests = shape_.requests;
  params.decodes = shape_.decodes;
  params.decode_entries = size_ == nullptr ? 0 : size_->shape.batch;
  params.groups = groups_;
  params.windows_max = cuda::BlockWindows(shape_.tokens, shape_.requests);
  params.pages_max = limits_.pages;
  params.tokens = shape_.tokens;
  params.request_tokens_max = shape_.tokens_max;
  params.query_start = batch_.query_start;
  params.lengths = batch_.lengths;
  params.history = batch_.history;
  params.sink = batch_.sink;
  params.recent = batch_.recent;
  params.headers = pool.recent;
  params.block_stride = pool.block_stride;
  params.blocks = pool.blocks;
  params.has_padding_block = limits_.padding_block.has_value();
  params.padding_block = limits_.padding_block.value_or(0);
  params.position_blocks = options_.rotations.position_blocks();
  params.pages_per_position_block = options_.rotations.pages_per_position_block();
  params.rows = row_memory_.get();
  params.row_bytes = row_bytes();
  params.status = reinterpret_cast<BlockStatus*>(status_.get());
  return params;
}

cuda::DecodeLengths GpuBlockAttention::LengthsOfDecode() const {
  return {.sink_tokens = tables_.sink_tokens,
          .pages = tables_.pages,
          .recent_tokens = tables_.recent_tokens,
          .recent_begin = zeros_,
          .bf16_pages = nullptr};
}

absl::Status GpuBlockAttention::Prepare(const BlockPool& pool, const BlockBatch& batch,
                                        const BlockStepShape& shape, DeviceStream stream) {
  shape_ = {};
  CRUMB_RETURN_IF_ERROR(Check(pool, batch, shape));
  batch_ = batch;
  shape_ = shape;
  size_ = nullptr;
  if (shape.decodes > 0) {
    size_ = &decode_[std::bit_width(static_cast<unsigned>(shape.decodes - 1))];
  }
  groups_ = cuda::BlockGroups(shape.tokens, shape.requests - shape.decodes);
  absl::Status status = Enqueue(pool, stream);
  if (!status.ok()) shape_ = {};
  return status;
}

absl::Status GpuBlockAttention::Enqueue(const BlockPool& pool, DeviceStream stream) {
  CRUMB_RETURN_IF_ERROR(device_.kernels().PlanBlocks(PlanOf(pool), stream));
  if (size_ == nullptr) return absl::OkStatus();
  return size_->plans.Enqueue(device_, LengthsOfDecode(), stream);
}

absl::Status GpuBlockAttention::TakeFault() {
  auto* const status = reinterpret_cast<BlockStatus*>(status_.get());
  const uint32_t fault = std::atomic_ref<uint32_t>(status->fault).exchange(cuda::kBlockFaultNone);
  if (fault == cuda::kBlockFaultNone) return absl::OkStatus();
  const std::string request =
      fmt::format("request {} of a step ", std::atomic_ref<uint32_t>(status->request).load());
  switch (fault) {
    case cuda::kBlockFaultLengths:
      return absl::InvalidArgumentError(
          request + "has lengths that do not fit each other, its tables or the limits");
    case cuda::kBlockFaultBlock:
      return absl::InvalidArgumentError(request + "has a block outside the pool");
    case cuda::kBlockFaultHit:
      return absl::InvalidArgumentError(
          request + "begins with a number of computed tokens that is no multiple of 64");
    default:
      return absl::FailedPreconditionError(
          request +
          "lacks rows of earlier tokens: new requests need a first recent block of zeros");
  }
}

absl::StatusOr<std::unique_ptr<DeviceBlockAttention>> DeviceBlockAttention::Open(
    const WorkerOptions& options, const DeviceBlockLimits& limits, Device& device) {
  CRUMB_RETURN_IF_ERROR(CheckBlockOptions(options));
  CRUMB_RETURN_IF_ERROR(limits.Validate());
  auto attention = std::make_unique<GpuBlockAttention>(options, limits, device);
  CRUMB_RETURN_IF_ERROR(attention->Allocate());
  return attention;
}

}  // namespace crumb::client
