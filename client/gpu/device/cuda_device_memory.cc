// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>

#include <cerrno>
#include <map>
#include <utility>

#include "client/gpu/device/cuda_driver.h"
#include "client/gpu/device/device_memory.h"
#include "common/errno_status.h"
#include "common/logging.h"
#include "common/mutex.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Context is one device's primary context, which the CUDA runtime uses too, with a stream of its
// own in it, so that copies wait for no other work. All objects of the device own it together.
class Context {
 public:
  static absl::StatusOr<std::shared_ptr<const Context>> Open(int ordinal) {
    CRUMB_ASSIGN_OR_RETURN(const CudaDriver* driver, CudaDriver::Load());
    if (driver->Init(0) != CUDA_SUCCESS) return absl::UnavailableError("no CUDA device is usable");
    CUdevice device = 0;
    if (driver->DeviceGet(&device, ordinal) != CUDA_SUCCESS) {
      return absl::UnavailableError("there is no CUDA device " + std::to_string(ordinal));
    }
    int shares = 0;
    CRUMB_RETURN_IF_ERROR(driver->Check(
        driver->DeviceGetAttribute(
            &shares, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, device),
        "cuDeviceGetAttribute"));
    if (shares == 0) {
      return absl::FailedPreconditionError("CUDA device " + std::to_string(ordinal) +
                                           " cannot share memory by descriptors");
    }
    CUcontext context = nullptr;
    CRUMB_RETURN_IF_ERROR(
        driver->Check(driver->PrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain"));
    std::shared_ptr<Context> opened(new Context(*driver, device, context));
    CRUMB_RETURN_IF_ERROR(opened->MakeStream());
    return opened;
  }

  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
    if (stream_ != nullptr) {
      const Current current(*this);
      driver_.StreamDestroy(stream_);
    }
    driver_.PrimaryCtxRelease(device_);
  }

  // Current makes the context the calling thread's current one for its own lifetime.
  class Current {
   public:
    explicit Current(const Context& context) : driver_(context.driver_) {
      driver_.CtxPushCurrent(context.context_);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    ~Current() {
      CUcontext popped;
      driver_.CtxPopCurrent(&popped);
    }

   private:
    const CudaDriver& driver_;
  };

  const CudaDriver& driver() const { return driver_; }
  CUdevice device() const { return device_; }
  CUstream stream() const { return stream_; }
  CUmemAllocationProp allocation() const {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device_;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    return prop;
  }

 private:
  Context(const CudaDriver& driver, CUdevice device, CUcontext context)
      : driver_(driver), device_(device), context_(context) {}

  absl::Status MakeStream() {
    const Current current(*this);
    return driver_.Check(driver_.StreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  }

  const CudaDriver& driver_;
  const CUdevice device_;
  const CUcontext context_;
  CUstream stream_ = nullptr;
};

using SharedContext = std::shared_ptr<const Context>;

void Drop(const CudaDriver& driver, CUresult result, const char* what) {
  const absl::Status status = driver.Check(result, what);
  if (!status.ok()) LogWarning("{}", status.ToString());
}

class CudaHandle final : public DeviceHandle {
 public:
  // `imported_from` is the descriptor of an import; invalid for memory allocated here.
  CudaHandle(SharedContext context, CUmemGenericAllocationHandle handle, uint64_t bytes,
             UniqueFd imported_from)
      : context_(std::move(context)),
        handle_(handle),
        bytes_(bytes),
        imported_from_(std::move(imported_from)) {}
  ~CudaHandle() override {
    const Context::Current current(*context_);
    Drop(context_->driver(), context_->driver().MemRelease(handle_), "cuMemRelease");
  }

  uint64_t bytes() const override { return bytes_; }
  absl::StatusOr<UniqueFd> Export() const override {
    if (imported_from_.valid()) {
      UniqueFd copy(::fcntl(imported_from_.get(), F_DUPFD_CLOEXEC, 0));
      if (!copy.valid()) return ErrnoStatus(errno, "duplicating a descriptor of device memory");
      return copy;
    }
    const Context::Current current(*context_);
    int fd = -1;
    CRUMB_RETURN_IF_ERROR(context_->driver().Check(
        context_->driver().MemExport(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
        "cuMemExportToShareableHandle"));
    return UniqueFd(fd);
  }
  CUmemGenericAllocationHandle handle() const { return handle_; }

 private:
  const SharedContext context_;
  const CUmemGenericAllocationHandle handle_;
  const uint64_t bytes_;
  const UniqueFd imported_from_;
};

class CudaRange final : public DeviceRange {
 public:
  CudaRange(SharedContext context, CUdeviceptr base, uint64_t bytes, uint64_t granularity)
      : context_(std::move(context)), base_(base), bytes_(bytes), granularity_(granularity) {}
  ~CudaRange() override {
    const Context::Current current(*context_);
    MutexLock lock(&mutex_);
    for (const auto& [offset, size] : mapped_) {
      Drop(driver(), driver().MemUnmap(base_ + offset, size), "cuMemUnmap");
    }
    Drop(driver(), driver().MemAddressFree(base_, bytes_), "cuMemAddressFree");
  }

  DeviceAddress base() const override { return base_; }
  uint64_t bytes() const override { return bytes_; }

  absl::Status Map(uint64_t offset, const DeviceHandle& handle) override {
    const uint64_t size = handle.bytes();
    if (offset % granularity_ != 0 || size > bytes_ || offset > bytes_ - size) {
      return absl::InvalidArgumentError("a mapping lies outside its range");
    }
    const Context::Current current(*context_);
    MutexLock lock(&mutex_);
    const auto next = mapped_.lower_bound(offset);
    const bool free_behind = next == mapped_.end() || next->first >= offset + size;
    const bool free_before =
        next == mapped_.begin() || std::prev(next)->first + std::prev(next)->second <= offset;
    if (!free_behind || !free_before) {
      return absl::InvalidArgumentError("something is mapped there");
    }
    const CUdeviceptr at = base_ + offset;
    CRUMB_RETURN_IF_ERROR(driver().Check(
        driver().MemMap(at, size, 0, static_cast<const CudaHandle&>(handle).handle(), 0),
        "cuMemMap"));
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = context_->device();
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const absl::Status allowed =
        driver().Check(driver().MemSetAccess(at, size, &access, 1), "cuMemSetAccess");
    if (!allowed.ok()) {
      Drop(driver(), driver().MemUnmap(at, size), "cuMemUnmap");
      return allowed;
    }
    mapped_.emplace(offset, size);
    return absl::OkStatus();
  }

  absl::Status Unmap(uint64_t offset) override {
    const Context::Current current(*context_);
    MutexLock lock(&mutex_);
    const auto found = mapped_.find(offset);
    if (found == mapped_.end()) return absl::NotFoundError("nothing is mapped there");
    CRUMB_RETURN_IF_ERROR(
        driver().Check(driver().MemUnmap(base_ + offset, found->second), "cuMemUnmap"));
    mapped_.erase(found);
    return absl::OkStatus();
  }

 private:
  const CudaDriver& driver() const { return context_->driver(); }

  const SharedContext context_;
  const CUdeviceptr base_;
  const uint64_t bytes_;
  const uint64_t granularity_;
  Mutex mutex_;
  std::map<uint64_t, uint64_t> mapped_ ABSL_GUARDED_BY(mutex_);  // offset -> bytes
};

class CudaDeviceMemory final : public DeviceMemory {
 public:
  enum class Whose { kOwn, kPeer };
  // `context` is that of the device that reads.
  CudaDeviceMemory(SharedContext context, const DeviceUuid& uuid, uint64_t granularity, Whose whose)
      : context_(std::move(context)), uuid_(uuid), granularity_(granularity), whose_(whose) {}

  const DeviceUuid& uuid() const override { return uuid_; }
  uint64_t granularity() const override { return granularity_; }

  absl::StatusOr<std::unique_ptr<DeviceHandle>> Allocate(uint64_t bytes) override {
    if (whose_ == Whose::kPeer) {
      return absl::FailedPreconditionError("a peer's memory is allocated by its own workers");
    }
    if (bytes == 0 || bytes % granularity_ != 0) {
      return absl::InvalidArgumentError("a handle's size is a multiple of the granularity");
    }
    const Context::Current current(*context_);
    const CUmemAllocationProp prop = context_->allocation();
    CUmemGenericAllocationHandle handle = 0;
    CRUMB_RETURN_IF_ERROR(
        driver().Check(driver().MemCreate(&handle, bytes, &prop, 0), "cuMemCreate"));
    return std::make_unique<CudaHandle>(context_, handle, bytes, UniqueFd());
  }

  absl::StatusOr<std::unique_ptr<DeviceHandle>> Import(UniqueFd fd, uint64_t bytes) override {
    const Context::Current current(*context_);
    CUmemGenericAllocationHandle handle = 0;
    const CUresult imported =
        driver().MemImport(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd.get())),
                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    if (imported != CUDA_SUCCESS) {
      return absl::DataLossError(
          driver().Check(imported, "cuMemImportFromShareableHandle").message());
    }
    return std::make_unique<CudaHandle>(context_, handle, bytes, std::move(fd));
  }

  absl::StatusOr<std::unique_ptr<DeviceRange>> Reserve(uint64_t bytes) override {
    if (bytes == 0 || bytes % granularity_ != 0) {
      return absl::InvalidArgumentError("a range's size is a multiple of the granularity");
    }
    const Context::Current current(*context_);
    CUdeviceptr base = 0;
    CRUMB_RETURN_IF_ERROR(driver().Check(
        driver().MemAddressReserve(&base, bytes, granularity_, 0, 0), "cuMemAddressReserve"));
    return std::make_unique<CudaRange>(context_, base, bytes, granularity_);
  }

  absl::Status CopyToHost(DeviceAddress from, std::span<std::byte> to) override {
    const Context::Current current(*context_);
    CRUMB_RETURN_IF_ERROR(
        driver().Check(driver().MemcpyDtoHAsync(to.data(), from, to.size(), context_->stream()),
                       "cuMemcpyDtoHAsync"));
    return driver().Check(driver().StreamSynchronize(context_->stream()), "cuStreamSynchronize");
  }

 private:
  const CudaDriver& driver() const { return context_->driver(); }

  const SharedContext context_;
  const DeviceUuid uuid_;
  const uint64_t granularity_;
  const Whose whose_;
};

absl::StatusOr<DeviceUuid> UuidOf(const CudaDriver& driver, CUdevice device) {
  CUuuid name;
  CRUMB_RETURN_IF_ERROR(driver.Check(driver.DeviceGetUuid(&name, device), "cuDeviceGetUuid"));
  DeviceUuid uuid;
  static_assert(sizeof(name.bytes) == sizeof(uuid.bytes));
  std::memcpy(uuid.bytes.data(), name.bytes, sizeof(name.bytes));
  return uuid;
}

// Returns the granularity of memory on `device`, for any device that maps it.
absl::StatusOr<uint64_t> GranularityOf(const CudaDriver& driver, CUmemAllocationProp prop,
                                       CUdevice device) {
  prop.location.id = device;
  size_t granularity = 0;
  CRUMB_RETURN_IF_ERROR(driver.Check(
      driver.MemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
      "cuMemGetAllocationGranularity"));
  return granularity;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceMemory>> DeviceMemory::OpenCuda(int ordinal) {
  CRUMB_ASSIGN_OR_RETURN(SharedContext context, Context::Open(ordinal));
  const CudaDriver& driver = context->driver();
  CRUMB_ASSIGN_OR_RETURN(const DeviceUuid uuid, UuidOf(driver, context->device()));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t granularity,
                         GranularityOf(driver, context->allocation(), context->device()));
  return std::make_unique<CudaDeviceMemory>(std::move(context), uuid, granularity,
                                            CudaDeviceMemory::Whose::kOwn);
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> DeviceMemory::OpenCudaPeer(int ordinal, int peer) {
  CRUMB_ASSIGN_OR_RETURN(SharedContext context, Context::Open(ordinal));
  const CudaDriver& driver = context->driver();
  CUdevice device = 0;
  if (driver.DeviceGet(&device, peer) != CUDA_SUCCESS) {
    return absl::UnavailableError("there is no CUDA device " + std::to_string(peer));
  }
  int reaches = 0;
  CRUMB_RETURN_IF_ERROR(driver.Check(
      driver.DeviceCanAccessPeer(&reaches, context->device(), device), "cuDeviceCanAccessPeer"));
  if (reaches == 0) {
    return absl::FailedPreconditionError("CUDA device " + std::to_string(ordinal) +
                                         " does not reach the memory of device " +
                                         std::to_string(peer));
  }
  CRUMB_ASSIGN_OR_RETURN(const DeviceUuid uuid, UuidOf(driver, device));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t granularity,
                         GranularityOf(driver, context->allocation(), device));
  return std::make_unique<CudaDeviceMemory>(std::move(context), uuid, granularity,
                                            CudaDeviceMemory::Whose::kPeer);
}

}  // namespace crumb::client
