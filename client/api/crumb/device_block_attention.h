// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "crumb/block_attention.h"
#include "crumb/device_options.h"

namespace crumb::client {

class Device;

// DeviceBlockLimits bound the steps of a DeviceBlockAttention and thereby its device memory, which
// is allocated when it is opened: device_bytes().
struct DeviceBlockLimits {
  int requests = 256;  // requests of a step
  int tokens = 8192;   // fresh tokens of a step
  int pages = 512;     // history blocks that a request attends
  // A request whose first recent block has this id takes no part in a step, as the padding of
  // captured steps.
  std::optional<int32_t> padding_block = std::nullopt;

  absl::Status Validate() const;
};

// The sizes of a step that the host knows. They determine the grids; the tables in device memory
// determine the work.
struct BlockStepShape {
  int requests = 0;
  // The first `decodes` requests have one fresh token each, token i being request i's, or none.
  int decodes = 0;
  int tokens = 0;      // fresh tokens of all requests, or more
  int tokens_max = 0;  // fresh tokens of one request, or more

  bool decodes_only() const { return decodes == requests; }
};

// DeviceBlockAttention is BlockAttention in device memory: pools, tables, lengths and rows are
// device pointers, and all work is enqueued on the caller's stream, without waiting and without
// allocating. Prepare and Attend of all layers can be captured into a graph, which serves every
// step of the same shape: tables and lengths are read when the kernels run.
//
// Rows are those of BlockAttention, and a request's state is in its blocks. Its header is in the
// pool that Prepare is given.
//
// Errors of a step's tables are found by the device. The outputs of a request at fault are NaN, its
// rows and its header are unchanged, and history blocks that it would have completed have undefined
// contents; other requests are computed. If query_start is not ascending from 0, all requests are
// at fault. TakeFault reports a fault when the kernels have run. Not thread-safe; steps run one
// after another in the order of the stream.
class DeviceBlockAttention {
 public:
  // `device` is borrowed. Blocks until constants are uploaded. kInvalidArgument names the option
  // that is wrong; kResourceExhausted: there is too little device memory.
  static absl::StatusOr<std::unique_ptr<DeviceBlockAttention>> Open(const WorkerOptions& options,
                                                                    const DeviceBlockLimits& limits,
                                                                    Device& device);
  virtual ~DeviceBlockAttention() = default;

  virtual const BlockGeometry& geometry() const = 0;
  // The constants of the model (rotations and means) are not included.
  virtual uint64_t device_bytes() const = 0;

  // Begins a step: computes its tables. `pool` is the memory of any one layer. Its base addresses
  // and its block_stride, as those of every pool, are multiples of 128. kInvalidArgument: they are
  // not, or the shape is beyond the limits. After an error there is no step, and Attend fails.
  // REQUIRES: every Prepare passes the same layer's pool, because request headers are stored only
  // there.
  virtual absl::Status Prepare(const BlockPool& pool, const BlockBatch& batch,
                               const BlockStepShape& shape, DeviceStream stream) = 0;

  // Stores the fresh rows of one layer and computes attention of the fresh tokens. q and out have
  // adjacent tokens: their strides are q_heads * head_dim. All rows begin at multiples of 16 bytes.
  virtual absl::Status Attend(int layer, const BlockPool& pool, const FreshRows& rows,
                              DeviceStream stream) = 0;

  // Returns the fault of the latest request at fault since the last call, or OK if the device found
  // none so far. Does not wait for the device.
  virtual absl::Status TakeFault() = 0;
};

}  // namespace crumb::client
