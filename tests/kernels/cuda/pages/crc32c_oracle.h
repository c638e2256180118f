// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace crumb::kernels::cuda {

// Computes CRC-32C bit by bit. Its value for the nine digits "123456789" is 0xe3069283.
inline uint32_t Crc32cOracle(const uint8_t* bytes, size_t size) {
  uint32_t crc = ~0u;
  for (size_t i = 0; i < size; ++i) {
    crc ^= bytes[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0x82F63B78u : 0u);
  }
  return ~crc;
}

}  // namespace crumb::kernels::cuda
