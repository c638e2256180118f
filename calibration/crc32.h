// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace crumb::calibration {

// The CRC-32 of ZIP (polynomial 0x04C11DB7, reflected, APPNOTE.TXT 4.4.7).
uint32_t Crc32(std::span<const std::byte> bytes);

}  // namespace crumb::calibration
