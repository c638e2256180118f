// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>

#include "storage/policy/policy.h"

namespace crumb::storage {

// `default`: the leaf that is worth least according to a ReuseModel goes first; among equals, the
// one not used for longest. An epoch of the model is an eighth of `capacity_items` insertions.
// Remembers eight times `capacity_items` evicted items, so that an item that comes back is known.
// docs/adr/0003-eviction-policy.md tells why.
std::unique_ptr<EvictionPolicy> MakeReusePolicy(size_t capacity_items);

}  // namespace crumb::storage
