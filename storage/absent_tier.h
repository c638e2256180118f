// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "storage/fragment_tier.h"

namespace crumb::storage {

// The tier below of a node without SSD: holds no pages, and records as long as the process lives.
std::unique_ptr<FragmentTier> MakeAbsentTier();

}  // namespace crumb::storage
