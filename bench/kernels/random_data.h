// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/tile.h"

// Random inputs, made on the device. Each function waits until the data is there.
namespace crumb::bench {

// `count` page tiles at `tiles` whose elements have a deviation near 1.
void FillTiles(const kernels::TileShape& shape, size_t count, uint32_t seed, uint8_t* tiles);

// Normal deviates.
void FillBf16(size_t count, uint32_t seed, kernels::Bf16* values);

// An orthogonal matrix [dim, dim], row-major, on the host.
std::vector<float> RandomRotation(int dim, std::mt19937& random);

}  // namespace crumb::bench
