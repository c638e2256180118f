// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

namespace crumb::kernels {

// Calls fn(std::integral_constant<int, n>, row) for rows [begin, end) in blocks of n = kRows as
// long as they fit, then of half as many, down to one, so that each block size is compiled by
// itself. REQUIRES: kRows is a power of two.
template <int kRows, typename Fn>
[[gnu::always_inline]] inline void ForRowBlocks(int begin, int end, const Fn& fn) {
  int row = begin;
  for (; row + kRows <= end; row += kRows) fn(std::integral_constant<int, kRows>(), row);
  if constexpr (kRows > 1) ForRowBlocks<kRows / 2>(row, end, fn);
}

}  // namespace crumb::kernels
