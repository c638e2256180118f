// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "client/gpu/device/device_kernels.h"

namespace crumb::client {

// CudaKernels launches the kernels of kernels/cuda on one device, which it makes current for each
// call.
//
// Launch errors become status codes by FromCuda; errors of the kernels themselves show at a later
// synchronization, as with every CUDA launch. Thread-safe: it has no state but the ordinal.
class CudaKernels final : public DeviceKernels {
 public:
  explicit CudaKernels(int ordinal) : ordinal_(ordinal) {}

  bool Supports(const kernels::TileShape& tile) const override;
  bool DecodeSupported(const kernels::cuda::DecodeShape& shape) const override;
  size_t RotationBytes(int head_dim) const override;
  size_t FeedbackBytes(int head_dim) const override;
  size_t PlanBytes(const kernels::cuda::DecodeShape& shape) const override;
  size_t DecodeWorkspaceBytes(const kernels::cuda::DecodeShape& shape) const override;
  size_t EvictWorkspaceBytes(int windows_max, int layers, int kv_heads) const override;
  size_t QuantizeFromWorkspaceBytes(const kernels::cuda::EvictParams& evict) const override;
  absl::Status PrepareRotation(const float* rotation, int head_dim, int matrices,
                               kernels::cuda::EvictRotation* prepared,
                               DeviceStream stream) override;
  absl::Status PrepareFeedback(const float* feedback, int head_dim, int matrices,
                               kernels::cuda::EvictFeedback* prepared,
                               DeviceStream stream) override;
  absl::Status Append(const kernels::cuda::AppendParams& params, DeviceStream stream) override;
  absl::Status Evict(const kernels::cuda::EvictParams& params, DeviceStream stream) override;
  absl::Status Plan(const kernels::cuda::DecodeShape& shape,
                    const kernels::cuda::DecodeLengths& lengths, int window, void* plan,
                    DeviceStream stream) override;
  absl::Status Decode(const kernels::cuda::DecodeAttentionParams& params,
                      DeviceStream stream) override;
  absl::Status Prefill(const kernels::cuda::PrefillAttentionParams& params,
                       DeviceStream stream) override;
  absl::Status Fetch(const kernels::cuda::FetchParams& params, DeviceStream stream) override;
  absl::Status QueryOffsets(const kernels::cuda::QueryOffsetsParams& params,
                            DeviceStream stream) override;
  absl::Status PlanBlocks(const kernels::cuda::PlanBlocksParams& params,
                          DeviceStream stream) override;
  absl::Status MoveBlockRows(const kernels::cuda::MoveBlockRowsParams& params,
                             DeviceStream stream) override;
  absl::Status QuantizeFrom(const kernels::cuda::QuantizeFromParams& params,
                            DeviceStream stream) override;
  absl::Status Dequantize(const kernels::cuda::DequantizeParams& params,
                          DeviceStream stream) override;

 private:
  const int ordinal_;
};

}  // namespace crumb::client
