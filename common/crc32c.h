// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crumb {

// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78, initial and final value ~0). `crc` is the
// value of the bytes before, 0 at the start. Uses the CPU's instruction where there is one.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// Copies `source` to `target` (no overlap) and returns the CRC-32C of the bytes written, each of
// which was read from `source` once: a writer that changes `source` meanwhile cannot make sum and
// copy disagree.
uint32_t CopyCrc32c(std::byte* target, std::span<const std::byte> source);

// Computes Crc32c by table on any machine; tests compare the fast versions with it.
uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc = 0);

}  // namespace crumb
