// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace crumb::client {

// Where a page was found. Values are those of the wire.
enum class Tier { kUnknown = 0, kDevice = 1, kHost = 2, kSsd = 3, kRemote = 4 };

std::string_view TierName(Tier tier);

}  // namespace crumb::client
