// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

#include "storage/policy/policy.h"

namespace crumb::storage {

// `default`: orders leaves by learned worth (ReusePolicy) while that serves a sample of the
// accesses better than the age of their last use, which it begins with. Two shadow caches of 4,000
// to 8,000 items, one per order, run on items picked by fingerprint.
// docs/adr/0003-eviction-policy.md.
std::unique_ptr<EvictionPolicy> MakeDefaultPolicy(size_t capacity_items);

}  // namespace crumb::storage
