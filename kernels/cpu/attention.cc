// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/attention.h"

#include <algorithm>

#include "kernels/cpu/kernel_table.h"
#include "kernels/cpu/scratch.h"

namespace crumb::kernels {

size_t AttentionWorkspaceBytes(const AttentionParams& params) {
  AttendScratch scratch;
  return LayOutScratch(params, nullptr, &scratch);
}

void Attend(const AttentionParams& params, int kv_head_begin, int kv_head_end, void* workspace) {
  const KernelTable& kernels = ActiveKernels();
  AttendScratch scratch;
  LayOutScratch(params, workspace, &scratch);
  const int tokens = TokensPerBlock(params);
  for (int head = kv_head_begin; head < kv_head_end; ++head) {
    for (int token = 0; token < params.q_tokens; token += tokens) {
      RowBlock block;
      block.kv_head = head;
      block.heads = params.q_heads / params.kv_heads;
      block.token_begin = token;
      block.tokens = std::min(tokens, params.q_tokens - token);
      kernels.attend_rows(params, block, scratch);
    }
  }
}

}  // namespace crumb::kernels
