// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::kernels::cuda {

inline constexpr int kPageRows = 64;

// `lengths` is of decode or of prefill.
template <class Lengths>
__device__ __forceinline__ int Bf16Pages(const Lengths& lengths, int sequence) {
  return lengths.bf16_pages == nullptr ? 0 : lengths.bf16_pages[sequence];
}

// BF16 tokens of a sequence behind its INT2 history: those of BF16 pages, then recent ones.
template <class Lengths>
__device__ __forceinline__ int WindowTokens(const Lengths& lengths, int sequence) {
  return kPageRows * Bf16Pages(lengths, sequence) + lengths.recent_tokens[sequence];
}

}  // namespace crumb::kernels::cuda
