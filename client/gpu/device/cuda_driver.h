// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace crumb::client {

// CudaDriver has the functions of the CUDA driver that shared device memory needs. They are loaded
// from the machine's libcuda.so.1; nothing is linked against it.
//
// The runtime (libcudart) has no calls for memory that can be exported, and libcrumb must load on
// machines without a GPU. The table lives as long as the process.
struct CudaDriver {
  // Loads the functions, once per process. kUnavailable: there is no driver, or it is too old.
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

  // Converts a result of the call that `what` names. kResourceExhausted: no memory; kInternal: any
  // other error.
  absl::Status Check(CUresult result, const char* what) const;
};

}  // namespace crumb::client
