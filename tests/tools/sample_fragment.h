// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "kernels/tile.h"
#include "tools/fragment_file.h"

namespace crumb::tools {

// Returns layers 2 to 4 and KV heads 1 to 3 of a page, filled with noise from `seed`. Scales and
// minima are finite, and the checksums are right. The same seed yields the same bytes.
FragmentFile SampleInt2Fragment(const kernels::TileShape& shape, uint32_t seed);

// Returns such a fragment in BF16 with values in [-2, 2].
FragmentFile SampleBf16Fragment(int head_dim, uint32_t seed);

// Returns the tiles and then the header.
std::vector<std::byte> EncodeFragment(const FragmentFile& fragment);

}  // namespace crumb::tools
