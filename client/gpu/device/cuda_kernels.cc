// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/cuda_kernels.h"

#include <string>

#include "client/gpu/device/cuda_status.h"
#include "client/gpu/device/current_device.h"
#include "kernels/cuda/blocks/blocks.h"
#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/evict/constants.h"
#include "kernels/cuda/evict/evict.h"
#include "kernels/cuda/pages/pages.h"
#include "kernels/cuda/prefill/prefill_attention.h"

namespace crumb::client {

namespace cuda = kernels::cuda;

namespace {

cudaStream_t CudaStream(DeviceStream stream) { return reinterpret_cast<cudaStream_t>(stream); }

absl::Status FromEvict(cudaError_t error, const kernels::TileShape& tile) {
  if (error == cudaErrorInvalidConfiguration) {
    cudaGetLastError();
    return absl::FailedPreconditionError(
        "evict: a block of this GPU has too little shared memory for method crumb at head_dim " +
        std::to_string(tile.head_dim) + "; take method oscar (docs/kernels/cuda.md)");
  }
  return FromCuda(error, "evict");
}

}  // namespace

bool CudaKernels::Supports(const kernels::TileShape& tile) const {
  const CurrentDevice current(ordinal_);
  return tile.Valid() && cuda::EvictSupported(tile) && cuda::PrefillSupported({.tile = tile}) &&
         cuda::DecodeSupported({.tile = tile});
}

bool CudaKernels::DecodeSupported(const cuda::DecodeShape& shape) const {
  const CurrentDevice current(ordinal_);
  return cuda::DecodeSupported(shape);
}

size_t CudaKernels::RotationBytes(int head_dim) const { return cuda::EvictRotationBytes(head_dim); }

size_t CudaKernels::FeedbackBytes(int head_dim) const { return cuda::EvictFeedbackBytes(head_dim); }

size_t CudaKernels::PlanBytes(const cuda::DecodeShape& shape) const {
  const CurrentDevice current(ordinal_);
  return cuda::DecodePlanBytes(shape);
}

size_t CudaKernels::DecodeWorkspaceBytes(const cuda::DecodeShape& shape) const {
  const CurrentDevice current(ordinal_);
  return cuda::DecodeWorkspaceBytes(shape);
}

size_t CudaKernels::EvictWorkspaceBytes(int windows_max, int layers, int kv_heads) const {
  const CurrentDevice current(ordinal_);
  return cuda::EvictWorkspaceBytes(windows_max, layers, kv_heads);
}

size_t CudaKernels::QuantizeFromWorkspaceBytes(const cuda::EvictParams& evict) const {
  return cuda::QuantizeFromWorkspaceBytes(evict);
}

absl::Status CudaKernels::PrepareRotation(const float* rotation, int head_dim, int matrices,
                                          cuda::EvictRotation* prepared, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(
      cuda::PrepareEvictRotation(rotation, head_dim, matrices, prepared, CudaStream(stream)),
      "preparing rotations");
}

absl::Status CudaKernels::PrepareFeedback(const float* feedback, int head_dim, int matrices,
                                          cuda::EvictFeedback* prepared, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(
      cuda::PrepareEvictFeedback(feedback, head_dim, matrices, prepared, CudaStream(stream)),
      "preparing feedback");
}

absl::Status CudaKernels::Append(const cuda::AppendParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::AppendRows(params, CudaStream(stream)), "append");
}

absl::Status CudaKernels::Evict(const cuda::EvictParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromEvict(cuda::EvictWindows(params, CudaStream(stream)), params.tile);
}

absl::Status CudaKernels::Plan(const cuda::DecodeShape& shape, const cuda::DecodeLengths& lengths,
                               int window, void* plan, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::PlanDecode(shape, lengths, window, plan, CudaStream(stream)),
                  "decode plan");
}

absl::Status CudaKernels::Decode(const cuda::DecodeAttentionParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::DecodeAttention(params, CudaStream(stream)), "decode attention");
}

absl::Status CudaKernels::Prefill(const cuda::PrefillAttentionParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::PrefillAttention(params, CudaStream(stream)), "prefill attention");
}

absl::Status CudaKernels::Fetch(const cuda::FetchParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::FetchTiles(params, CudaStream(stream)), "fetch");
}

absl::Status CudaKernels::QueryOffsets(const cuda::QueryOffsetsParams& params,
                                       DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::QueryOffsets(params, CudaStream(stream)), "query offsets");
}

absl::Status CudaKernels::PlanBlocks(const cuda::PlanBlocksParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::PlanBlocks(params, CudaStream(stream)), "block plan");
}

absl::Status CudaKernels::MoveBlockRows(const cuda::MoveBlockRowsParams& params,
                                        DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::MoveBlockRows(params, CudaStream(stream)), "block rows");
}

absl::Status CudaKernels::QuantizeFrom(const cuda::QuantizeFromParams& params,
                                       DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromEvict(cuda::QuantizeFromPages(params, CudaStream(stream)), params.evict.tile);
}

absl::Status CudaKernels::Dequantize(const cuda::DequantizeParams& params, DeviceStream stream) {
  const CurrentDevice current(ordinal_);
  return FromCuda(cuda::DequantizePages(params, CudaStream(stream)), "dequantize");
}

}  // namespace crumb::client
