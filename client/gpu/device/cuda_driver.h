// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb::client {

// The CUDA driver's calls that shared memory needs, from libcuda.so.1 as it is on the machine:
// nothing is linked against it.
struct CudaDriver {
  // kUnavailable: there is no driver, or one that is too old. Loaded once, for good.
  static absl::StatusOr<const CudaDriver*> Load();

  decltype(&::cuInit) Init;
  decltype(&::cuGetErrorString) GetErrorString;
  decltype(&::cuDeviceGet) DeviceGet;
  decltype(&::cuDeviceGetUuid_v2) DeviceGetUuid;
  decltype(&::cuDeviceGetAttribute) DeviceGetAttribute;
  decltype(&::cuDeviceCanAccessPeer) DeviceCanAccessPeer;
  decltype(&::cuDevicePrimaryCtxRetain) PrimaryCtxRetain;
  decltype(&::cuDevicePrimaryCtxRelease) PrimaryCtxRelease;
  decltype(&::cuCtxPushCurrent) CtxPushCurrent;
  decltype(&::cuCtxPopCurrent) CtxPopCurrent;
  decltype(&::cuMemGetAllocationGranularity) MemGetAllocationGranularity;
  decltype(&::cuMemCreate) MemCreate;
  decltype(&::cuMemRelease) MemRelease;
  decltype(&::cuMemExportToShareableHandle) MemExport;
  decltype(&::cuMemImportFromShareableHandle) MemImport;
  decltype(&::cuMemAddressReserve) MemAddressReserve;
  decltype(&::cuMemAddressFree) MemAddressFree;
  decltype(&::cuMemMap) MemMap;
  decltype(&::cuMemUnmap) MemUnmap;
  decltype(&::cuMemSetAccess) MemSetAccess;
  decltype(&::cuMemcpyDtoHAsync) MemcpyDtoHAsync;
  decltype(&::cuStreamCreate) StreamCreate;
  decltype(&::cuStreamSynchronize) StreamSynchronize;
  decltype(&::cuStreamDestroy) StreamDestroy;

  // `what` names the call. kResourceExhausted: no memory; kInternal: anything else.
  absl::Status Check(CUresult result, const char* what) const;
};

}  // namespace crumb::client
