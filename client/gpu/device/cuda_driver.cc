// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device/cuda_driver.h"

#include <dlfcn.h>

#include <string>

namespace crumb::client {
namespace {

// Expands in two steps, so that cuda.h's macros can rename calls to their newest version.
#define CRUMB_NAME_OF(call) CRUMB_QUOTED(call)
#define CRUMB_QUOTED(call) #call

absl::StatusOr<CudaDriver> LoadDriver() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(std::string("no CUDA driver: ") + ::dlerror());
  }
  CudaDriver driver;
  std::string missing;
  const auto find = [&](auto& call, const char* name) {
    call = reinterpret_cast<std::decay_t<decltype(call)>>(::dlsym(library, name));
    if (call == nullptr) missing = name;
  };
  find(driver.Init, CRUMB_NAME_OF(cuInit));
  find(driver.GetErrorString, CRUMB_NAME_OF(cuGetErrorString));
  find(driver.DeviceGet, CRUMB_NAME_OF(cuDeviceGet));
  find(driver.DeviceGetUuid, CRUMB_NAME_OF(cuDeviceGetUuid_v2));
  find(driver.DeviceGetAttribute, CRUMB_NAME_OF(cuDeviceGetAttribute));
  find(driver.DeviceCanAccessPeer, CRUMB_NAME_OF(cuDeviceCanAccessPeer));
  find(driver.PrimaryCtxRetain, CRUMB_NAME_OF(cuDevicePrimaryCtxRetain));
  find(driver.PrimaryCtxRelease, CRUMB_NAME_OF(cuDevicePrimaryCtxRelease));
  find(driver.CtxPushCurrent, CRUMB_NAME_OF(cuCtxPushCurrent));
  find(driver.CtxPopCurrent, CRUMB_NAME_OF(cuCtxPopCurrent));
  find(driver.MemGetAllocationGranularity, CRUMB_NAME_OF(cuMemGetAllocationGranularity));
  find(driver.MemCreate, CRUMB_NAME_OF(cuMemCreate));
  find(driver.MemRelease, CRUMB_NAME_OF(cuMemRelease));
  find(driver.MemExport, CRUMB_NAME_OF(cuMemExportToShareableHandle));
  find(driver.MemImport, CRUMB_NAME_OF(cuMemImportFromShareableHandle));
  find(driver.MemAddressReserve, CRUMB_NAME_OF(cuMemAddressReserve));
  find(driver.MemAddressFree, CRUMB_NAME_OF(cuMemAddressFree));
  find(driver.MemMap, CRUMB_NAME_OF(cuMemMap));
  find(driver.MemUnmap, CRUMB_NAME_OF(cuMemUnmap));
  find(driver.MemSetAccess, CRUMB_NAME_OF(cuMemSetAccess));
  find(driver.MemcpyDtoHAsync, CRUMB_NAME_OF(cuMemcpyDtoHAsync));
  find(driver.StreamCreate, CRUMB_NAME_OF(cuStreamCreate));
  find(driver.StreamSynchronize, CRUMB_NAME_OF(cuStreamSynchronize));
  find(driver.StreamDestroy, CRUMB_NAME_OF(cuStreamDestroy));
  if (!missing.empty()) return absl::UnavailableError("the CUDA driver is too old: no " + missing);
  return driver;
}

#undef CRUMB_NAME_OF
#undef CRUMB_QUOTED

}  // namespace

absl::StatusOr<const CudaDriver*> CudaDriver::Load() {
  static const absl::StatusOr<CudaDriver> driver = LoadDriver();
  if (!driver.ok()) return driver.status();
  return &*driver;
}

absl::Status CudaDriver::Check(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const char* text = nullptr;
  if (GetErrorString(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  const std::string message = std::string(what) + ": " + text;
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

}  // namespace crumb::client
