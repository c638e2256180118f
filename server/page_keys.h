// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "common/page_key.h"

namespace crumb::server {

// The index of the first key that is equal to one before it; none: each key is there once. Takes
// O(keys) time.
std::optional<size_t> FindDuplicate(std::span<const PageKey> keys);

}  // namespace crumb::server
