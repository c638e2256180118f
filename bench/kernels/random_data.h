// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/tile.h"

// Random inputs that are made on the device. Each function waits for its data.
namespace crumb::bench {

// Fills `count` page tiles with elements whose standard deviation is near 1.
void FillTiles(const kernels::TileShape& shape, size_t count, uint32_t seed, uint8_t* tiles);

// Fills rows with normal deviates.
void FillBf16(size_t count, uint32_t seed, kernels::Bf16* values);

// Returns an orthogonal matrix [dim, dim], row-major, in host memory.
std::vector<float> RandomRotation(int dim, std::mt19937& random);

}  // namespace crumb::bench
