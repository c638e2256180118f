// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/decode_dispatch.h"
#include "kernels/cuda/decode_kernel.cuh"

namespace crumb::kernels::cuda {
namespace {

template <int dim, int groups, bool bulk>
DecodeLauncher FindColumns(int columns) {
  if (columns <= 4) return LaunchDecode<DecodeTraits<dim, groups, 1, true, bulk>>;
  if (columns <= 8) return LaunchDecode<DecodeTraits<dim, groups, 1, false, bulk>>;
  return nullptr;
}

}  // namespace

DecodeLauncher FindDecodeKernel(const TileShape& tile, int columns, bool bulk) {
  if (tile.head_dim != 128 || tile.group_size != 128) return nullptr;
  return bulk ? FindColumns<128, 1, true>(columns) : FindColumns<128, 1, false>(columns);
}

}  // namespace crumb::kernels::cuda
