// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/cuda/decode/dispatch.h"
#include "kernels/cuda/decode/planned_kernel.cuh"

namespace crumb::kernels::cuda {

template <int dim, int groups, int column_tiles, bool pair>
DecodeLauncher Instance(bool bulk) {
  if (bulk) return LaunchDecode<DecodeTraits<dim, groups, column_tiles, pair, true>>;
  return LaunchDecode<DecodeTraits<dim, groups, column_tiles, pair, false>>;
}

// Up to 8 columns.
template <int dim, int groups>
DecodeLauncher NarrowInstance(int columns, bool bulk) {
  if (columns <= 4) return Instance<dim, groups, 1, true>(bulk);
  if (columns <= 8) return Instance<dim, groups, 1, false>(bulk);
  return nullptr;
}

}  // namespace crumb::kernels::cuda
