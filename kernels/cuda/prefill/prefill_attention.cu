// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill_attention.h"

#include "kernels/cuda/prefill/dispatch.h"

namespace crumb::kernels::cuda {

bool PrefillSupported(const PrefillShape& s) {
  return s.tile.Valid() && s.tile.tokens == 64 && s.batch >= 1 && s.batch <= 65535 &&
         s.max_pages >= 1 && s.fresh_max >= 1 && s.kv_heads >= 1 && s.kv_heads <= 65535 &&
         s.q_heads % s.kv_heads == 0 && s.q_heads / s.kv_heads >= 1 &&
         s.q_heads / s.kv_heads <= kMaxQueryHeadsPerKvHead;
}

cudaError_t PrefillAttention(const PrefillAttentionParams& p, cudaStream_t stream, PrefillMma mma) {
  if (!PrefillSupported(p.shape)) return cudaErrorInvalidValue;
  const int groups = p.shape.tile.groups();
  switch (p.shape.tile.head_dim) {
    case 64:
      return groups == 1 ? prefill::LaunchPrefill<64, 1>(p, stream, mma)
                         : prefill::LaunchPrefill<64, 2>(p, stream, mma);
    case 128:
      if (groups == 1) return prefill::LaunchPrefill<128, 1>(p, stream, mma);
      return groups == 2 ? prefill::LaunchPrefill<128, 2>(p, stream, mma)
                         : prefill::LaunchPrefill<128, 4>(p, stream, mma);
    default:
      if (groups == 2) return prefill::LaunchPrefill<256, 2>(p, stream, mma);
      return groups == 4 ? prefill::LaunchPrefill<256, 4>(p, stream, mma)
                         : prefill::LaunchPrefill<256, 8>(p, stream, mma);
  }
}

}  // namespace crumb::kernels::cuda
