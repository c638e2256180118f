// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace crumb {

// Lower-case hexadecimal.
std::string HexEncode(std::span<const uint8_t> bytes);

// Fills `out` from exactly 2 * out.size() hexadecimal digits. Returns false on anything else.
bool HexDecode(std::string_view text, std::span<uint8_t> out);

}  // namespace crumb
