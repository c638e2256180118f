// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "storage/policy/policy.h"

namespace crumb::storage {

// `fifo`: the item inserted first goes first, be it a leaf or not. A yardstick for replay.
std::unique_ptr<EvictionPolicy> MakeFifoPolicy();

}  // namespace crumb::storage
