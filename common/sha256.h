// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

namespace crumb {

using Digest = std::array<uint8_t, 32>;

Digest Sha256(std::span<const uint8_t> bytes);
Digest Sha256(std::string_view text);
Digest HmacSha256(std::string_view key, std::string_view text);

}  // namespace crumb
