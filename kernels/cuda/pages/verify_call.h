// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

// What a call of VerifyTiles is given (verify.h). Plain data that needs no CUDA header. All
// pointers are device pointers.
namespace crumb::kernels::cuda {

// Tile i of run j: run_address[j] + i * tile_bytes, i in [0, tiles_per_run): a run is what lies
// side by side, such as the tiles of one layer of one page.
struct VerifyParams {
  size_t tile_bytes = 0;  // a multiple of 16, at most 12,288
  int runs = 0;
  int tiles_per_run = 1;
  const uint64_t* run_address = nullptr;  // [runs] 16-byte aligned
  const uint32_t* sums = nullptr;         // [runs, tiles_per_run] what the tiles should have
  // [runs] is OR-ed with bit min(i, 31) where tile i differs. Null: not written.
  uint32_t* status = nullptr;
  uint32_t* found = nullptr;  // [runs, tiles_per_run] the sums that the tiles have, or null
};

}  // namespace crumb::kernels::cuda
