// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/decode_attention.h"
#include "kernels/cuda/decode_plan.h"

namespace crumb::kernels::cuda {

// The parameters as the kernel sees them: pointers of plan and workspace resolved.
struct DecodeKernelParams {
  DecodeAttentionParams p;
  PlanView plan;
  WorkspaceView workspace;
  DecodeLaunch launch;
  int heads;      // query heads per KV head
  int first_row;  // of this launch, query rows of a KV head
  int columns;    // of this launch
  float scale;
  float log2_scale;  // scale * log2(e)
};

}  // namespace crumb::kernels::cuda
