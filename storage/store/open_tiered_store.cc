// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/open_tiered_store.h"

#include <map>
#include <utility>

#include "common/mutex.h"
#include "common/status_macros.h"
#include "storage/ssd/ssd_tier.h"
#include "storage/store/three_tier_store.h"

namespace crumb::storage {
namespace {

absl::Status NoTier() { return absl::UnavailableError("no SSD tier is configured"); }

// The tier below host memory of a store without an SSD. It has no fragments and refuses new ones;
// it only keeps the server's records, in memory, so that they can be handed to a successor.
class RecordsOnlyTier final : public FragmentTier {
 public:
  std::vector<absl::Status> Put(std::span<const FragmentWrite> fragments) override {
    return std::vector<absl::Status>(fragments.size(), NoTier());
  }
  std::vector<FragmentMeta> Find(const KeyspaceId&, const PageKey&) const override { return {}; }
  absl::Status Get(const FragmentMeta&, std::span<std::byte>) override {
    return absl::NotFoundError("no SSD tier is configured");
  }
  void Touch(const KeyspaceId&, std::span<const PageKey>) override {}
  uint32_t Pin(const KeyspaceId&, std::span<const PageKey>, TimePoint) override { return 0; }
  absl::StatusOr<uint32_t> Remove(const KeyspaceId&, std::span<const PageKey>) override {
    return 0u;
  }
  absl::StatusOr<uint64_t> Drop(const KeyspaceId&, uint64_t) override { return uint64_t{0}; }
  uint64_t GenerationOf(const KeyspaceId&) const override { return 0; }
  uint64_t KeyspaceBytes(const KeyspaceId&) const override { return 0; }
  uint64_t KeyspacePages(const KeyspaceId&) const override { return 0; }
  void ForEachPage(const KeyspaceId&, const std::function<void(const PageKey&)>&) const override {}

  absl::Status PutRecord(const std::string& name, const std::string& value) override {
    MutexLock lock(&mutex_);
    if (value.empty()) {
      records_.erase(name);
    } else {
      records_[name] = value;
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::vector<std::pair<std::string, std::string>>> Records() const override {
    MutexLock lock(&mutex_);
    return std::vector<std::pair<std::string, std::string>>(records_.begin(), records_.end());
  }

  absl::Status Sync() override { return absl::OkStatus(); }
  absl::Status Writable() const override { return NoTier(); }
  void AddStats(StoreStats& stats) const override { stats.ssd.state = "off: not configured"; }

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::string> records_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<FragmentTier> MakeRecordsOnlyTier() { return std::make_unique<RecordsOnlyTier>(); }

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
    return options.ssd.path.empty() ? MakeRecordsOnlyTier()
                                    : SsdTier::Open(options.ssd, clock, std::move(tier_events));
  };
  return OpenTieredStore(options, clock, std::move(events), open_below, std::move(start));
}

}  // namespace crumb::storage
