// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "crumb/device_options.h"
#include "kernels/cuda/blocks/blocks_call.h"
#include "kernels/cuda/decode/decode_call.h"
#include "kernels/cuda/evict/evict_call.h"
#include "kernels/cuda/pages/append_call.h"
#include "kernels/cuda/pages/fetch_call.h"
#include "kernels/cuda/pages/paged_kv_call.h"
#include "kernels/cuda/pages/query_offsets_call.h"
#include "kernels/cuda/prefill/prefill_call.h"

namespace crumb::client {

// DeviceKernels is the client's interface to the kernels of kernels/cuda. Launches only enqueue.
// Parameters are copied by the call; memory that they refer to is read when the kernel runs.
// kInvalidArgument: the kernel does not support the sizes.
//
// Each function has the contract of the function of that name in kernels/cuda, where shapes and
// alignments of the parameters are documented.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  // Returns whether all kernels support tiles of this shape.
  virtual bool Supports(const kernels::TileShape& tile) const = 0;
  // Returns whether decode attention supports the shape: the query rows of a KV head are bounded.
  virtual bool DecodeSupported(const kernels::cuda::DecodeShape& shape) const = 0;

  // The sizes of memory that callers provide; see kernels/cuda.
  virtual size_t RotationBytes(int head_dim) const = 0;  // size of one prepared matrix
  virtual size_t FeedbackBytes(int head_dim) const = 0;
  virtual size_t PlanBytes(const kernels::cuda::DecodeShape& shape) const = 0;
  virtual size_t DecodeWorkspaceBytes(const kernels::cuda::DecodeShape& shape) const = 0;
  virtual size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads) const = 0;
  virtual size_t QuantizeFromWorkspaceBytes(const kernels::cuda::EvictParams& evict) const = 0;

  // Converts constants [matrices, head_dim, head_dim] to the layout that Evict reads.
  virtual absl::Status PrepareRotation(const float* rotation, int head_dim, int matrices,
                                       kernels::cuda::EvictRotation* prepared,
                                       DeviceStream stream) = 0;
  virtual absl::Status PrepareFeedback(const float* feedback, int head_dim, int matrices,
                                       kernels::cuda::EvictFeedback* prepared,
                                       DeviceStream stream) = 0;

  // Append writes fresh rows to sinks and rings; Evict turns windows into pages; Plan distributes
  // the pages of a step over warps; Decode and Prefill compute attention of one layer; Fetch copies
  // and verifies tiles; QueryOffsets computes the terms of the means.
  virtual absl::Status Append(const kernels::cuda::AppendParams& params, DeviceStream stream) = 0;
  virtual absl::Status Evict(const kernels::cuda::EvictParams& params, DeviceStream stream) = 0;
  // `window` is the sliding window of the layers that use the plan; 0: none.
  virtual absl::Status Plan(const kernels::cuda::DecodeShape& shape,
                            const kernels::cuda::DecodeLengths& lengths, int window, void* plan,
                            DeviceStream stream) = 0;
  virtual absl::Status Decode(const kernels::cuda::DecodeAttentionParams& params,
                              DeviceStream stream) = 0;
  virtual absl::Status Prefill(const kernels::cuda::PrefillAttentionParams& params,
                               DeviceStream stream) = 0;
  virtual absl::Status Fetch(const kernels::cuda::FetchParams& params, DeviceStream stream) = 0;
  virtual absl::Status QueryOffsets(const kernels::cuda::QueryOffsetsParams& params,
                                    DeviceStream stream) = 0;
  // Compute the tables of a step over an engine's blocks, and move its BF16 rows.
  virtual absl::Status PlanBlocks(const kernels::cuda::PlanBlocksParams& params,
                                  DeviceStream stream) = 0;
  virtual absl::Status MoveBlockRows(const kernels::cuda::MoveBlockRowsParams& params,
                                     DeviceStream stream) = 0;
  // Copies pages between tiles and an engine's own paged cache.
  virtual absl::Status QuantizeFrom(const kernels::cuda::QuantizeFromParams& params,
                                    DeviceStream stream) = 0;
  virtual absl::Status Dequantize(const kernels::cuda::DequantizeParams& params,
                                  DeviceStream stream) = 0;
};

}  // namespace crumb::client
