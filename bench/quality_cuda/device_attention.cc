// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/quality_cuda/device_attention.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/status_macros.h"
#include "kernels/cuda/decode/decode_attention.h"

namespace crumb::bench {
namespace {

using kernels::AttentionParams;
using kernels::Bf16;

constexpr int kQueryTokensMax = 8;  // query tokens of one launch
constexpr int kColumnsMax = 32;
constexpr int kSizeStep = 64;  // sizes are rounded up to it, so that there are few shapes

absl::Status FromCuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(std::string("CUDA, ") + what + ": " + cudaGetErrorString(error));
}

// Device memory that grows on demand.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer&) = delete;
  DeviceBuffer& operator=(const DeviceBuffer&) = delete;
  ~DeviceBuffer() { cudaFree(data_); }

  absl::Status Reserve(size_t bytes) {
    if (bytes <= bytes_) return absl::OkStatus();
    cudaFree(data_);
    data_ = nullptr;
    bytes_ = 0;
    CRUMB_RETURN_IF_ERROR(FromCuda(cudaMalloc(&data_, bytes), "cudaMalloc"));
    bytes_ = bytes;
    return absl::OkStatus();
  }
  absl::Status Upload(const void* from, size_t bytes) {
    CRUMB_RETURN_IF_ERROR(Reserve(std::max<size_t>(bytes, 1)));
    return FromCuda(cudaMemcpy(data_, from, bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

int RoundUp(int value) { return (value + kSizeStep - 1) / kSizeStep * kSizeStep; }

class DeviceAttention {
 public:
  absl::Status Attend(const AttentionParams& params) {
    MutexLock lock(&mutex_);
    if (params.recent_begin + params.recent_tokens > params.recent_capacity) {
      return absl::InvalidArgumentError("device attention takes recent rows that do not wrap");
    }
    CRUMB_RETURN_IF_ERROR(UploadRows(params));
    CRUMB_RETURN_IF_ERROR(UploadPages(params));
    CRUMB_RETURN_IF_ERROR(UploadConstants(params));
    const int slice =
        std::min(kQueryTokensMax, std::max(1, kColumnsMax * params.kv_heads / params.q_heads));
    CRUMB_RETURN_IF_ERROR(UploadLengths(params, slice));
    const size_t outputs = size_t{1} * params.q_tokens * params.q_heads * params.shape.head_dim;
    CRUMB_RETURN_IF_ERROR(out_.Reserve(outputs * sizeof(float)));
    for (int first = 0; first < params.q_tokens; first += slice) {
      CRUMB_RETURN_IF_ERROR(
          Launch(params, first, std::min(slice, params.q_tokens - first), first / slice));
    }
    // The copy waits for the kernels, which are in the same stream.
    return FromCuda(
        cudaMemcpy(params.out, out_.as<float>(), outputs * sizeof(float), cudaMemcpyDeviceToHost),
        "decode attention");
  }

 private:
  // Copies K and then V rows of all heads, [{K, V}, kv_heads, tokens, head_dim].
  absl::Status UploadWindow(const AttentionParams& params, const Bf16* k, const Bf16* v,
                            int64_t head_stride, int tokens, DeviceBuffer& to, uint64_t* address) {
    const size_t row = size_t{1} * tokens * params.shape.head_dim * sizeof(Bf16);
    CRUMB_RETURN_IF_ERROR(to.Reserve(std::max<size_t>(1, 2 * row * params.kv_heads)));
    *address = reinterpret_cast<uint64_t>(to.as<uint8_t>());
    if (tokens == 0) return absl::OkStatus();
    for (const Bf16* from : {k, v}) {
      uint8_t* target = to.as<uint8_t>() + (from == v ? row * params.kv_heads : 0);
      CRUMB_RETURN_IF_ERROR(FromCuda(cudaMemcpy2D(target, row, from, head_stride * sizeof(Bf16),
                                                  row, params.kv_heads, cudaMemcpyHostToDevice),
                                     "copy of rows"));
    }
    return absl::OkStatus();
  }

  absl::Status UploadRows(const AttentionParams& params) {
    uint64_t addresses[2] = {};
    CRUMB_RETURN_IF_ERROR(UploadWindow(params, params.sink_k, params.sink_v,
                                       params.sink_head_stride, params.sink_tokens, sink_,
                                       &addresses[0]));
    const int64_t skip = params.recent_begin * params.recent_token_stride;
    CRUMB_RETURN_IF_ERROR(UploadWindow(params, params.recent_k + skip, params.recent_v + skip,
                                       params.recent_head_stride, params.recent_tokens, recent_,
                                       &addresses[1]));
    return row_addresses_.Upload(addresses, sizeof(addresses));
  }

  absl::Status UploadPages(const AttentionParams& params) {
    const size_t page = params.page_head_stride * params.kv_heads;
    std::vector<uint8_t> tiles(page * params.pages);
    for (int i = 0; i < params.pages; ++i) {
      std::memcpy(tiles.data() + i * page, reinterpret_cast<const void*>(params.page_address[i]),
                  page);
    }
    CRUMB_RETURN_IF_ERROR(tiles_.Upload(tiles.data(), tiles.size()));
    std::vector<uint64_t> addresses(RoundUp(params.pages + 1));
    for (int i = 0; i < params.pages; ++i) {
      addresses[i] = reinterpret_cast<uint64_t>(tiles_.as<uint8_t>() + i * page);
    }
    return page_addresses_.Upload(addresses.data(), addresses.size() * sizeof(uint64_t));
  }

  absl::Status UploadConstants(const AttentionParams& params) {
    const size_t dim = params.shape.head_dim, heads = params.kv_heads;
    const size_t rows = size_t{1} * params.q_tokens * params.q_heads;
    const auto floats = [](DeviceBuffer& to, const float* from, size_t count) {
      return from == nullptr ? absl::OkStatus() : to.Upload(from, count * sizeof(float));
    };
    CRUMB_RETURN_IF_ERROR(q_.Upload(params.q, rows * dim * sizeof(Bf16)));
    CRUMB_RETURN_IF_ERROR(floats(rotation_k_, params.rotation_k, heads * dim * dim));
    CRUMB_RETURN_IF_ERROR(floats(rotation_v_, params.rotation_v, heads * dim * dim));
    CRUMB_RETURN_IF_ERROR(floats(mean_v_, params.mean_v, heads * dim));
    CRUMB_RETURN_IF_ERROR(floats(offset_, params.offset, rows * params.position_blocks));
    return floats(shift_, params.shift, params.q_heads);
  }

  // The counts are sink tokens, pages, the begin of the ring, and the recent tokens of every slice.
  absl::Status UploadLengths(const AttentionParams& params, int slice) {
    std::vector<int32_t> lengths = {params.sink_tokens, params.pages, 0};
    for (int first = 0; first < params.q_tokens; first += slice) {
      const int behind = params.q_tokens - std::min(params.q_tokens, first + slice);
      lengths.push_back(params.recent_tokens - behind);
    }
    return lengths_.Upload(lengths.data(), lengths.size() * sizeof(int32_t));
  }

  absl::Status Launch(const AttentionParams& params, int first, int tokens, int slice) {
    kernels::cuda::DecodeAttentionParams device;
    device.shape = {.tile = params.shape,
                    .max_pages = RoundUp(params.pages + 1),
                    .q_tokens = tokens,
                    .kv_heads = params.kv_heads,
                    .q_heads = params.q_heads,
                    .window_tokens_max = RoundUp(params.sink_tokens + params.recent_tokens)};
    if (!kernels::cuda::DecodeSupported(device.shape)) {
      return absl::InvalidArgumentError("the CUDA kernel does not serve this model's geometry");
    }
    const int32_t* lengths = lengths_.as<int32_t>();
    device.lengths = {lengths, lengths + 1, lengths + 3 + slice, lengths + 2};
    const int64_t row = int64_t{first} * params.q_heads;
    const int64_t dim = params.shape.head_dim;
    device.q = q_.as<Bf16>() + row * dim;
    device.out = out_.as<float>() + row * dim;
    device.out_type = kernels::cuda::OutType::kF32;
    device.page_address = page_addresses_.as<uint64_t>();
    device.page_head_stride = params.page_head_stride;
    device.sink = RowsOf(params, params.sink_tokens, row_addresses_.as<uint64_t>());
    device.recent = RowsOf(params, params.recent_tokens, row_addresses_.as<uint64_t>() + 1);
    device.recent_capacity = std::max(1, params.recent_tokens);
    if (params.rotation_k != nullptr) device.rotation_k = rotation_k_.as<float>();
    if (params.rotation_v != nullptr) device.rotation_v = rotation_v_.as<float>();
    if (params.mean_v != nullptr) device.mean_v = mean_v_.as<float>();
    if (params.shift != nullptr) device.shift = shift_.as<float>();
    if (params.offset != nullptr) {
      device.offset = offset_.as<float>() + row * params.position_blocks;
      device.position_blocks = params.position_blocks;
      device.pages_per_position_block = params.pages_per_position_block;
    }
    device.scale = params.scale;
    device.soft_cap = params.soft_cap;
    return Enqueue(device);
  }

  static kernels::cuda::Bf16Rows RowsOf(const AttentionParams& params, int tokens,
                                        const uint64_t* address) {
    const int64_t token = params.shape.head_dim * static_cast<int64_t>(sizeof(Bf16));
    return {.address = address,
            .head_stride = token * tokens,
            .token_stride = token,
            .v_offset = token * tokens * params.kv_heads};
  }

  absl::Status Enqueue(kernels::cuda::DecodeAttentionParams& device) {
    const size_t plan = kernels::cuda::DecodePlanBytes(device.shape);
    const size_t workspace = kernels::cuda::DecodeWorkspaceBytes(device.shape);
    CRUMB_RETURN_IF_ERROR(plan_.Reserve(plan));
    CRUMB_RETURN_IF_ERROR(workspace_.Reserve(workspace));
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaMemsetAsync(workspace_.as<void>(), 0, workspace, nullptr), "memset"));
    device.plan = plan_.as<void>();
    device.workspace = workspace_.as<void>();
    CRUMB_RETURN_IF_ERROR(FromCuda(
        kernels::cuda::PlanDecode(device.shape, device.lengths, 0, plan_.as<void>(), nullptr),
        "plan"));
    return FromCuda(kernels::cuda::DecodeAttention(device, nullptr), "decode attention");
  }

  Mutex mutex_;
  DeviceBuffer sink_, recent_, row_addresses_, tiles_, page_addresses_, lengths_;
  DeviceBuffer q_, out_, rotation_k_, rotation_v_, mean_v_, offset_, shift_, plan_, workspace_;
};

}  // namespace

absl::StatusOr<AttentionBackend> OpenDeviceAttention() {
  int devices = 0;
  const cudaError_t error = cudaGetDeviceCount(&devices);
  if (error != cudaSuccess || devices == 0) {
    return absl::FailedPreconditionError(
        std::string("no CUDA device: ") +
        (error != cudaSuccess ? cudaGetErrorString(error) : "the driver sees none") +
        "; use --device cpu");
  }
  auto attention = std::make_shared<DeviceAttention>();
  return AttentionBackend(
      [attention](const AttentionParams& params) { return attention->Attend(params); });
}

}  // namespace crumb::bench
