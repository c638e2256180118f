// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/decode/decode_attention.h"
#include "kernels/cuda/decode/plan.h"

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

// Whether the kernels of PlainTraits serve a call.
inline bool IsPlain(const DecodeAttentionParams& p) {
  return p.shape.q_tokens == 1 && p.soft_cap <= 0.0f && p.window <= 0 && p.rotation_k != nullptr &&
         p.rotation_v != nullptr;
}

}  // namespace crumb::kernels::cuda
