// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "client/gpu/decode_plans.h"
#include "client/gpu/device/device.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device_constants.h"
#include "crumb/device_block_attention.h"
#include "kernels/cuda/blocks/blocks_call.h"

namespace crumb::client {

// DeviceBlockAttention by the kernels of a Device. gpu_block_attention.cc allocates the memory and
// begins steps, gpu_block_layers.cc has the launches of a layer.
//
// A kernel (PlanBlocks) turns the engine's block tables into the address tables that the decode and
// prefill kernels read, and checks them, because the host does not see them. Another
// (MoveBlockRows) gathers rows of sink and recent blocks to contiguous memory in front of attention
// and stores the fresh rows.
//
//   Prepare, once per step: PlanBlocks, decode plans
//   Attend, per layer: rows stored and gathered, windows evicted, decode, then prefill attention
//
// Not thread-safe: one thread enqueues all steps, on one stream at a time.
class GpuBlockAttention final : public DeviceBlockAttention {
 public:
  // REQUIRES: options and limits are valid, and Allocate succeeds before any other call.
  GpuBlockAttention(const WorkerOptions& options, const DeviceBlockLimits& limits, Device& device)
      : options_(options), limits_(limits), geometry_(BlockGeometryOf(options)), device_(device) {}

  // Allocates all memory for the limits. kInvalidArgument: the kernels do not support the model.
  absl::Status Allocate();

  const BlockGeometry& geometry() const override { return geometry_; }
  uint64_t device_bytes() const override { return device_bytes_; }
  absl::Status Prepare(const BlockPool& pool, const BlockBatch& batch, const BlockStepShape& shape,
                       DeviceStream stream) override;
  absl::Status Attend(int layer, const BlockPool& pool, const FreshRows& rows,
                      DeviceStream stream) override;
  absl::Status TakeFault() override;

 private:
  // Decode attention of up to a number of requests. The workspace is zero where the kernels expect
  // it for one shape only, so that each shape has its own.
  struct DecodeSize {
    kernels::cuda::DecodeShape shape;
    DecodePlans plans;
    DeviceBuffer workspace;
  };

  // Allocates device memory and counts it in device_bytes().
  absl::StatusOr<DeviceBuffer> NewBuffer(size_t bytes);
  // Sets the tables' addresses in memory at `base`; returns the bytes that they take.
  size_t TakeTables(DeviceAddress base);
  // Allocates plans and workspaces for 1, 2, 4 and so on requests, up to the limit.
  absl::Status AllocateDecode(DeviceStream stream);
  kernels::cuda::DecodeShape DecodeShapeOf(int batch) const;
  // kInvalidArgument: the pool's alignment, or a step beyond the limits. Contents of device memory
  // are checked by PlanBlocks (TakeFault).
  absl::Status Check(const BlockPool& pool, const BlockBatch& batch,
                     const BlockStepShape& shape) const;
  // kInvalidArgument: layer, strides or alignment; kFailedPrecondition: there is no step.
  absl::Status CheckRows(int layer, const BlockPool& pool, const FreshRows& rows) const;
  // Enqueues the plans of the step.
  absl::Status Enqueue(const BlockPool& pool, DeviceStream stream);
  kernels::cuda::PlanBlocksParams PlanOf(const BlockPool& pool) const;
  kernels::cuda::DecodeLengths LengthsOfDecode() const;
  // The launches of a layer: move rows between blocks and contiguous memory, quantize windows that
  // are complete, compute the means' terms, and attend.
  absl::Status Move(kernels::cuda::BlockMove move, const BlockPool& pool, const FreshRows& rows,
                    DeviceStream stream) const;
  absl::Status Evict(int layer, const BlockPool& pool, DeviceStream stream) const;
  absl::StatusOr<const float*> Offsets(int layer, const FreshRows& rows, DeviceStream stream) const;
  void SetInputs(int layer, const BlockPool& pool, const FreshRows& rows, const float* offsets,
                 int first_entry, kernels::cuda::AttentionInputs* params) const;
  absl::Status Decode(int layer, const BlockPool& pool, const FreshRows& rows, const float* offsets,
                      DeviceStream stream) const;
  absl::Status Prefill(int layer, const BlockPool& pool, const FreshRows& rows,
                       const float* offsets, DeviceStream stream) const;

  // Bytes of a BF16 row, rows of contiguous memory, and bytes from its keys to its values.
  int64_t row_bytes() const { return int64_t{2} * options_.head_dim; }
  int64_t slots() const {
    return int64_t{kernels::cuda::RequestSlots(geometry_)} * limits_.requests + limits_.tokens;
  }
  int64_t v_offset() const { return row_bytes() * slots() * options_.own_kv_heads(); }

  const WorkerOptions options_;
  const DeviceBlockLimits limits_;
  const BlockGeometry geometry_;
  Device& device_;
  uint64_t device_bytes_ = 0;
  std::unique_ptr<DeviceConstants> constants_;
  DeviceBuffer table_memory_, row_memory_, offset_memory_;
  PinnedBuffer status_;
  kernels::cuda::BlockTables tables_;
  int32_t* zeros_ = nullptr;        // ring slots of the oldest rows, for entries and windows
  std::vector<DecodeSize> decode_;  // batches of 1, 2, 4, ...
  // The step under way; there is none if it has no requests.
  BlockBatch batch_;
  BlockStepShape shape_;
  DecodeSize* size_ = nullptr;  // null: no request decodes
  int groups_ = 0;
};

}  // namespace crumb::client
