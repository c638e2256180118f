// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/prefill/prefill_attention.h"

#include "kernels/cuda/prefill/dispatch.h"

namespace crumb::kernels::cuda {
namespace {

template <int dim, int groups>
cudaError_t LaunchRows(const PrefillAttentionParams& p, cudaStream_t stream) {
  return p.row_type == RowType::kFp16 ? prefill::LaunchPrefillFp16<dim, groups>(p, stream)
                                      : prefill::LaunchPrefill<dim, groups>(p, stream);
}

}  // namespace

bool PrefillSupported(const PrefillShape& s) {
  return s.tile.Valid() && s.tile.tokens == 64 && s.batch >= 1 && s.batch <= 65535 &&
         s.max_pages >= 1 && s.fresh_max >= 1 && s.kv_heads >= 1 && s.kv_heads <= 65535 &&
         s.q_heads % s.kv_heads == 0 && s.q_heads / s.kv_heads >= 1 &&
         s.q_heads / s.kv_heads <= kMaxQueryHeadsPerKvHead;
}

size_t PrefillWorkspaceBytes(const PrefillShape&) { return 0; }

cudaError_t PrefillAttention(const PrefillAttentionParams& p, cudaStream_t stream) {
  if (!PrefillSupported(p.shape)) return cudaErrorInvalidValue;
  const int groups = p.shape.tile.groups();
  switch (p.shape.tile.head_dim) {
    case 64:
      return groups == 1 ? LaunchRows<64, 1>(p, stream) : LaunchRows<64, 2>(p, stream);
    case 128:
      if (groups == 1) return LaunchRows<128, 1>(p, stream);
      return groups == 2 ? LaunchRows<128, 2>(p, stream) : LaunchRows<128, 4>(p, stream);
    default:
      if (groups == 2) return LaunchRows<256, 2>(p, stream);
      return groups == 4 ? LaunchRows<256, 4>(p, stream) : LaunchRows<256, 8>(p, stream);
  }
}

}  // namespace crumb::kernels::cuda
