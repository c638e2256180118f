// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "absl/status/status.h"
#include "crumb/device_options.h"
#include "kernels/cuda/decode/decode_call.h"
#include "kernels/cuda/evict/evict_call.h"
#include "kernels/cuda/pages/append_call.h"
#include "kernels/cuda/pages/fetch_call.h"
#include "kernels/cuda/pages/query_offsets_call.h"
#include "kernels/cuda/prefill/prefill_call.h"

namespace crumb::client {

// The kernels of kernels/cuda, as the client calls them. Launches enqueue only; parameters are
// copied by the call, what they point at is read when the kernel runs. kInvalidArgument: sizes that
// the kernel does not serve.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  // Whether all of them serve tiles of this shape.
  virtual bool Supports(const kernels::TileShape& tile) const = 0;
  virtual bool DecodeSupported(const kernels::cuda::DecodeShape& shape) const = 0;

  // Sizes of what callers provide, as kernels/cuda tells.
  virtual size_t RotationBytes(int head_dim) const = 0;  // of one prepared matrix
  virtual size_t FeedbackBytes(int head_dim) const = 0;
  virtual size_t PlanBytes(const kernels::cuda::DecodeShape& shape) const = 0;
  virtual size_t DecodeWorkspaceBytes(const kernels::cuda::DecodeShape& shape) const = 0;
  virtual size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads) const = 0;

  // Brings constants into the order in which Evict reads them; [matrices, head_dim, head_dim].
  virtual absl::Status PrepareRotation(const float* rotation, int head_dim, int matrices,
                                       kernels::cuda::EvictRotation* prepared,
                                       DeviceStream stream) = 0;
  virtual absl::Status PrepareFeedback(const float* feedback, int head_dim, int matrices,
                                       kernels::cuda::EvictFeedback* prepared,
                                       DeviceStream stream) = 0;

  virtual absl::Status Append(const kernels::cuda::AppendParams& params, DeviceStream stream) = 0;
  virtual absl::Status Evict(const kernels::cuda::EvictParams& params, DeviceStream stream) = 0;
  virtual absl::Status Plan(const kernels::cuda::DecodeShape& shape,
                            const kernels::cuda::DecodeLengths& lengths, void* plan,
                            DeviceStream stream) = 0;
  virtual absl::Status Decode(const kernels::cuda::DecodeAttentionParams& params,
                              DeviceStream stream) = 0;
  virtual absl::Status Prefill(const kernels::cuda::PrefillAttentionParams& params,
                               DeviceStream stream) = 0;
  virtual absl::Status Fetch(const kernels::cuda::FetchParams& params, DeviceStream stream) = 0;
  virtual absl::Status QueryOffsets(const kernels::cuda::QueryOffsetsParams& params,
                                    DeviceStream stream) = 0;
};

}  // namespace crumb::client
