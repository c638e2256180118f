// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <memory>
#include <vector>

#include "client/gpu/device/cuda_kernels.h"
#include "client/gpu/device/cuda_status.h"
#include "client/gpu/device/current_device.h"
#include "client/gpu/device/device.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "crumb/device_worker.h"

namespace crumb::client {
namespace {

cudaStream_t Of(DeviceStream stream) { return reinterpret_cast<cudaStream_t>(stream); }
cudaEvent_t Of(DeviceEvent event) { return reinterpret_cast<cudaEvent_t>(event); }
void* At(uint64_t address) { return reinterpret_cast<void*>(address); }

// Logs an error that cannot be returned to a caller.
void Drop(cudaError_t error, const char* what) {
  const absl::Status status = FromCuda(error, what);
  if (!status.ok()) LogWarning("{}", status.ToString());
}

class CudaDevice final : public Device {
 public:
  CudaDevice(int ordinal, bool kernels_read_pinned)
      : ordinal_(ordinal), kernels_(ordinal), kernels_read_pinned_(kernels_read_pinned) {}

  absl::StatusOr<DeviceAddress> Allocate(size_t bytes) override {
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    CRUMB_RETURN_IF_ERROR(FromCuda(cudaMalloc(&memory, bytes), "cudaMalloc"));
    return reinterpret_cast<DeviceAddress>(memory);
  }
  void Free(DeviceAddress address) override {
    const CurrentDevice current(ordinal_);
    Drop(cudaFree(At(address)), "cudaFree");
  }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    const CurrentDevice current(ordinal_);
    void* memory = nullptr;
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaHostAlloc(&memory, bytes, cudaHostAllocDefault), "cudaHostAlloc"));
    return static_cast<std::byte*>(memory);
  }
  void FreePinned(std::byte* bytes) override {
    const CurrentDevice current(ordinal_);
    Drop(cudaFreeHost(bytes), "cudaFreeHost");
  }
  absl::Status Pin(std::span<const std::byte> bytes, PinAccess access) override {
    const CurrentDevice current(ordinal_);
    const unsigned flags =
        access == PinAccess::kRead ? cudaHostRegisterReadOnly : cudaHostRegisterDefault;
    return FromCuda(cudaHostRegister(const_cast<std::byte*>(bytes.data()), bytes.size(), flags),
                    "cudaHostRegister");
  }
  void Unpin(std::span<const std::byte> bytes) override {
    const CurrentDevice current(ordinal_);
    Drop(cudaHostUnregister(const_cast<std::byte*>(bytes.data())), "cudaHostUnregister");
  }

  absl::StatusOr<DeviceStream> NewStream() override {
    const CurrentDevice current(ordinal_);
    cudaStream_t stream = nullptr;
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate"));
    return reinterpret_cast<DeviceStream>(stream);
  }
  absl::StatusOr<DeviceStream> NewUrgentStream() override {
    const CurrentDevice current(ordinal_);
    int least = 0, greatest = 0;
    CRUMB_RETURN_IF_ERROR(FromCuda(cudaDeviceGetStreamPriorityRange(&least, &greatest),
                                   "cudaDeviceGetStreamPriorityRange"));
    cudaStream_t stream = nullptr;
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest),
                 "cudaStreamCreateWithPriority"));
    return reinterpret_cast<DeviceStream>(stream);
  }
  void DeleteStream(DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    Drop(cudaStreamDestroy(Of(stream)), "cudaStreamDestroy");
  }
  absl::StatusOr<DeviceEvent> NewEvent() override {
    const CurrentDevice current(ordinal_);
    cudaEvent_t event = nullptr;
    CRUMB_RETURN_IF_ERROR(
        FromCuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync),
                 "cudaEventCreate"));
    return reinterpret_cast<DeviceEvent>(event);
  }
  void DeleteEvent(DeviceEvent event) override {
    const CurrentDevice current(ordinal_);
    Drop(cudaEventDestroy(Of(event)), "cudaEventDestroy");
  }

  absl::Status Record(DeviceEvent event, DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    return FromCuda(cudaEventRecord(Of(event), Of(stream)), "cudaEventRecord");
  }
  absl::Status Wait(DeviceStream stream, DeviceEvent event) override {
    const CurrentDevice current(ordinal_);
    return FromCuda(cudaStreamWaitEvent(Of(stream), Of(event), 0), "cudaStreamWaitEvent");
  }
  absl::StatusOr<bool> Done(DeviceEvent event) override {
    const CurrentDevice current(ordinal_);
    const cudaError_t error = cudaEventQuery(Of(event));
    if (error == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    CRUMB_RETURN_IF_ERROR(FromCuda(error, "cudaEventQuery"));
    return true;
  }
  absl::Status Synchronize(DeviceEvent event) override {
    const CurrentDevice current(ordinal_);
    return FromCuda(cudaEventSynchronize(Of(event)), "cudaEventSynchronize");
  }

  absl::Status ToDevice(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    return Copy(copies, stream);
  }
  absl::Status ToHost(std::span<const DeviceCopy> copies, DeviceStream stream) override {
    return Copy(copies, stream);
  }
  absl::Status CopyRows(const DeviceRowsCopy& copy, DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    if (copy.rows == 1) {
      return FromCuda(cudaMemcpyAsync(At(copy.to), At(copy.from), copy.row_bytes,
                                      cudaMemcpyDeviceToDevice, Of(stream)),
                      "cudaMemcpyAsync");
    }
    return FromCuda(
        cudaMemcpy2DAsync(At(copy.to), copy.to_pitch, At(copy.from), copy.from_pitch,
                          copy.row_bytes, copy.rows, cudaMemcpyDeviceToDevice, Of(stream)),
        "cudaMemcpy2DAsync");
  }
  absl::Status Clear(DeviceAddress address, size_t bytes, DeviceStream stream) override {
    const CurrentDevice current(ordinal_);
    return FromCuda(cudaMemsetAsync(At(address), 0, bytes, Of(stream)), "cudaMemsetAsync");
  }

  DeviceKernels& kernels() override { return kernels_; }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory() override {
    return DeviceMemory::OpenCuda(ordinal_);
  }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenPeerMemory(int peer) override {
    return DeviceMemory::OpenCudaPeer(ordinal_, peer);
  }
  bool kernels_read_pinned() const override { return kernels_read_pinned_; }

 private:
  // Makes many copies in one call if the runtime supports that: enqueueing them one by one takes
  // longer than the copies themselves.
  absl::Status Copy(std::span<const DeviceCopy> copies, DeviceStream stream) {
    const CurrentDevice current(ordinal_);
#if CUDART_VERSION >= 13000
    if (copies.size() > 1 && stream != nullptr) return CopyBatch(copies, stream);
#endif
    for (const DeviceCopy& copy : copies) {
      CRUMB_RETURN_IF_ERROR(FromCuda(
          cudaMemcpyAsync(At(copy.to), At(copy.from), copy.bytes, cudaMemcpyDefault, Of(stream)),
          "cudaMemcpyAsync"));
    }
    return absl::OkStatus();
  }

#if CUDART_VERSION >= 13000
  absl::Status CopyBatch(std::span<const DeviceCopy> copies, DeviceStream stream) {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<size_t> sizes;
    for (const DeviceCopy& copy : copies) {
      to.push_back(At(copy.to));
      from.push_back(At(copy.from));
      sizes.push_back(copy.bytes);
    }
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    size_t first = 0;
    return FromCuda(cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(),
                                         &attributes, &first, 1, Of(stream)),
                    "cudaMemcpyBatchAsync");
  }
#endif

  const int ordinal_;
  CudaKernels kernels_;
  const bool kernels_read_pinned_;
};

}  // namespace

void CloseDevice::operator()(Device* device) const { delete device; }

absl::StatusOr<OpenDevice> OpenCudaDevice(int ordinal) {
  int devices = 0;
  CRUMB_RETURN_IF_ERROR(FromCuda(cudaGetDeviceCount(&devices), "looking for CUDA devices"));
  if (ordinal < 0 || ordinal >= devices) {
    return absl::UnavailableError("CUDA device " + std::to_string(ordinal) + ": there are " +
                                  std::to_string(devices));
  }
  int same_address = 0;
  CRUMB_RETURN_IF_ERROR(FromCuda(
      cudaDeviceGetAttribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal),
      "reading the device's attributes"));
  return OpenDevice(new CudaDevice(ordinal, same_address != 0));
}

}  // namespace crumb::client
