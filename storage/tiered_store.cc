// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/tiered_store.h"

#include <utility>

#include "common/status_macros.h"
#include "storage/absent_tier.h"
#include "storage/open_tiered_store.h"
#include "storage/ssd/ssd_tier.h"
#include "storage/three_tier_store.h"

namespace crumb::storage {

absl::StatusOr<std::unique_ptr<TieredStore>> OpenTieredStore(const StoreOptions& options,
                                                             Clock& clock, StoreEvents events,
                                                             const OpenFragmentTier& open_below,
                                                             StoreStart start) {
  CRUMB_RETURN_IF_ERROR(options.Validate());
  auto store = std::make_unique<ThreeTierStore>(options, clock, std::move(events), start.epochs);
  CRUMB_RETURN_IF_ERROR(store->Start(open_below, std::move(start)));
  return store;
}

absl::StatusOr<std::unique_ptr<TieredStore>> TieredStore::Open(const StoreOptions& options,
                                                               Clock& clock, StoreEvents events,
                                                               StoreStart start) {
  const auto open_below = [&](FragmentTierEvents tier_events) {
    return options.ssd.path.empty() ? MakeAbsentTier()
                                    : SsdTier::Open(options.ssd, clock, std::move(tier_events));
  };
  return OpenTieredStore(options, clock, std::move(events), open_below, std::move(start));
}

}  // namespace crumb::storage
