// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/cuda/common/device_limits.h"

// Choices that decode attention makes by itself, for tests and benchmarks that compare them.
namespace crumb::kernels::cuda {

// How the work is divided (docs/kernels/decode.md). kPlanned: the plan cuts the batch's bytes into
// equal work ranges, one for each worker. kClusters: each (sequence, KV head) has one or several
// thread block clusters; this needs compute capability 9, head_dim and groups of 128, and at most
// 16 query rows per KV head. kAuto: clusters for one or two sequences; with more sequences the plan
// decides by their lengths, as long as every (sequence, KV head) can have a cluster at once. With
// batch_invariant kAuto is kPlanned.
enum class DecodeForm : uint8_t { kAuto, kPlanned, kClusters };

// The instructions that copy tiles to shared memory: bulk copies where the device has them (kAuto),
// or 16-byte cp.async. kAsync16 needs DecodeForm::kPlanned.
enum class CopyPath : uint8_t { kAuto, kAsync16 };

// REQUIRES: all calls of one step (DecodePlanBytes, DecodeWorkspaceBytes, PlanDecode,
// DecodeAttention) have the same tuning.
struct DecodeTuning {
  DecodeForm form = DecodeForm::kAuto;
  CopyPath copy_path = CopyPath::kAuto;
  DeviceLimits limits = {};
};

}  // namespace crumb::kernels::cuda
