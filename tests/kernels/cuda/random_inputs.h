// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "kernels/tile.h"

namespace crumb::kernels::cuda {

// Returns normally distributed elements of the given standard deviation.
std::vector<Bf16> RandomRows(size_t count, double deviation, std::mt19937& random);
std::vector<float> RandomFloats(size_t count, double deviation, std::mt19937& random);

// Returns the bits of an fp16 near x.
uint16_t Half(double x);

// Fills a tile with random codes, and scales and minima for which elements have about the given
// deviations.
void RandomTile(const TileShape& shape, double k_std, double v_std, std::mt19937& random,
                uint8_t* tile);

// Returns a random orthogonal matrix, [dim, dim] row-major.
std::vector<float> RandomRotation(int dim, std::mt19937& random);

}  // namespace crumb::kernels::cuda
