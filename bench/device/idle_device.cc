// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/device/device_workload.h"

#include <cstdlib>
#include <string>

#include "common/status_macros.h"

namespace crumb::bench {
namespace {

using client::Device;
using client::DeviceAddress;
using client::DeviceCopy;
using client::DeviceEvent;
using client::DeviceMemory;
using client::DeviceStream;

constexpr size_t kMemoryAlignment = 4096;
constexpr size_t kWorkspaceBytes = 1 << 16;

// Bytes of an allocation: enough for a worker's constants, which are never read.
class IdleKernels final : public client::DeviceKernels {
 public:
  bool Supports(const kernels::TileShape&) const override { return true; }
  bool DecodeSupported(const kernels::cuda::DecodeShape&) const override { return true; }
  size_t RotationBytes(int head_dim) const override { return MatrixBytes(head_dim); }
  size_t FeedbackBytes(int head_dim) const override { return MatrixBytes(head_dim); }
  size_t PlanBytes(const kernels::cuda::DecodeShape&) const override { return kWorkspaceBytes; }
  size_t DecodeWorkspaceBytes(const kernels::cuda::DecodeShape&) const override {
    return kWorkspaceBytes;
  }
  size_t EvictWorkspaceBytes(int, int, int) const override { return kWorkspaceBytes; }
  size_t QuantizeFromWorkspaceBytes(const kernels::cuda::EvictParams&) const override {
    return kWorkspaceBytes;
  }
  absl::Status PrepareRotation(const float*, int, int, kernels::cuda::EvictRotation*,
                               DeviceStream) override {
    return {};
  }
  absl::Status PrepareFeedback(const float*, int, int, kernels::cuda::EvictFeedback*,
                               DeviceStream) override {
    return {};
  }
  absl::Status Append(const kernels::cuda::AppendParams&, DeviceStream) override { return {}; }
  absl::Status Evict(const kernels::cuda::EvictParams&, DeviceStream) override { return {}; }
  absl::Status Plan(const kernels::cuda::DecodeShape&, const kernels::cuda::DecodeLengths&, int,
                    void*, DeviceStream) override {
    return {};
  }
  absl::Status Decode(const kernels::cuda::DecodeAttentionParams&, DeviceStream) override {
    return {};
  }
  absl::Status Prefill(const kernels::cuda::PrefillAttentionParams&, DeviceStream) override {
    return {};
  }
  absl::Status Fetch(const kernels::cuda::FetchParams&, DeviceStream) override { return {}; }
  absl::Status QueryOffsets(const kernels::cuda::QueryOffsetsParams&, DeviceStream) override {
    return {};
  }
  absl::Status PlanBlocks(const kernels::cuda::PlanBlocksParams&, DeviceStream) override {
    return {};
  }
  absl::Status MoveBlockRows(const kernels::cuda::MoveBlockRowsParams&, DeviceStream) override {
    return {};
  }
  absl::Status QuantizeFrom(const kernels::cuda::QuantizeFromParams&, DeviceStream) override {
    return {};
  }
  absl::Status Dequantize(const kernels::cuda::DequantizeParams&, DeviceStream) override {
    return {};
  }

 private:
  static size_t MatrixBytes(int head_dim) {
    return sizeof(float) * 2 * static_cast<size_t>(head_dim) * static_cast<size_t>(head_dim);
  }
};

std::unique_ptr<DeviceMemory> MemoryOf(int ordinal) {
  return DeviceMemory::OpenHost({.name = "idle" + std::to_string(ordinal)});
}

class IdleDevice final : public Device {
 public:
  explicit IdleDevice(int ordinal) : ordinal_(ordinal) {}

  absl::StatusOr<DeviceAddress> Allocate(size_t bytes) override {
    CRUMB_ASSIGN_OR_RETURN(std::byte * memory, AllocatePinned(bytes));
    return reinterpret_cast<DeviceAddress>(memory);
  }
  void Free(DeviceAddress address) override { std::free(reinterpret_cast<void*>(address)); }
  absl::StatusOr<std::byte*> AllocatePinned(size_t bytes) override {
    void* memory =
        std::aligned_alloc(kMemoryAlignment, (bytes / kMemoryAlignment + 1) * kMemoryAlignment);
    if (memory == nullptr) return absl::ResourceExhaustedError("no memory");
    return static_cast<std::byte*>(memory);
  }
  void FreePinned(std::byte* bytes) override { std::free(bytes); }
  absl::Status Pin(std::span<const std::byte>, client::PinAccess) override { return {}; }
  void Unpin(std::span<const std::byte>) override {}

  absl::StatusOr<DeviceStream> NewStream() override {
    return reinterpret_cast<DeviceStream>(new char);
  }
  absl::StatusOr<DeviceStream> NewUrgentStream() override { return NewStream(); }
  void DeleteStream(DeviceStream stream) override { delete reinterpret_cast<char*>(stream); }
  absl::StatusOr<DeviceEvent> NewEvent() override {
    return reinterpret_cast<DeviceEvent>(new char);
  }
  void DeleteEvent(DeviceEvent event) override { delete reinterpret_cast<char*>(event); }

  absl::Status Record(DeviceEvent, DeviceStream) override { return {}; }
  absl::Status Wait(DeviceStream, DeviceEvent) override { return {}; }
  absl::StatusOr<bool> Done(DeviceEvent) override { return true; }
  absl::Status Synchronize(DeviceEvent) override { return {}; }
  absl::Status ToDevice(std::span<const DeviceCopy>, DeviceStream) override { return {}; }
  absl::Status ToHost(std::span<const DeviceCopy>, DeviceStream) override { return {}; }
  absl::Status CopyRows(const client::DeviceRowsCopy&, DeviceStream) override { return {}; }
  absl::Status Clear(DeviceAddress, size_t, DeviceStream) override { return {}; }
  client::DeviceKernels& kernels() override { return kernels_; }
  bool kernels_read_pinned() const override { return true; }

  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory() override { return MemoryOf(ordinal_); }
  absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenPeerMemory(int ordinal) override {
    return MemoryOf(ordinal);
  }

 private:
  const int ordinal_;
  IdleKernels kernels_;
};

}  // namespace

std::unique_ptr<Device> OpenIdleDevice(int ordinal) {
  return std::make_unique<IdleDevice>(ordinal);
}

}  // namespace crumb::bench
