// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "storage/fragment_tier.h"
#include "storage/store_options.h"

// Host memory and the whole store with the face of a tier, for the suite that all tiers pass.
namespace crumb::storage {

std::unique_ptr<FragmentTier> HostAsTier(uint64_t bytes, const Clock& clock);
std::unique_ptr<FragmentTier> StoreAsTier(const StoreOptions& options);

}  // namespace crumb::storage
