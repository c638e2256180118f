// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "storage/policy/policy.h"

namespace crumb::storage {

// `lru`: the leaf whose last use is longest ago goes first.
std::unique_ptr<EvictionPolicy> MakeLruPolicy();

}  // namespace crumb::storage
