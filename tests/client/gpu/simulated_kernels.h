// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

#include "client/gpu/device/device_kernels.h"

namespace crumb::client {

class SimulatedDevice;

// SimulatedKernels are the kernels of a SimulatedDevice, computed by kernels/cpu when the queue
// reaches them: they give the same bytes and outputs as the CPU back end.
class SimulatedKernels final : public DeviceKernels {
 public:
  explicit SimulatedKernels(SimulatedDevice& device) : device_(device) {}

  // Launches of QuantizeFrom and of Dequantize so far.
  std::atomic<int> quantize_from_launches{0};
  std::atomic<int> dequantize_launches{0};

  bool Supports(const kernels::TileShape& tile) const override { return tile.tokens == 64; }
  bool DecodeSupported(const kernels::cuda::DecodeShape& shape) const override {
    return shape.tile.tokens == 64 && shape.query_rows() <= 32;
  }
  size_t RotationBytes(int head_dim) const override { return size_t{4} * head_dim * head_dim; }
  size_t FeedbackBytes(int head_dim) const override { return size_t{4} * head_dim * head_dim; }
  // A plan holds the lengths that it was made for.
  size_t PlanBytes(const kernels::cuda::DecodeShape& shape) const override {
    return size_t{20} * shape.batch;
  }
  size_t DecodeWorkspaceBytes(const kernels::cuda::DecodeShape&) const override { return 256; }
  size_t EvictWorkspaceBytes(int, int, int) const override { return 256; }
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
  void RunFetch(const kernels::cuda::FetchParams& params);

  SimulatedDevice& device_;
};

}  // namespace crumb::client
