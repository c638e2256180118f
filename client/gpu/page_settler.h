// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <climits>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/device/background.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/device_page.h"
#include "client/gpu/evict_results.h"
#include "client/worker/keyspace_binding.h"
#include "client/worker/sequence_starter.h"

namespace crumb::client {

// What has turned out about the pages of a sequence. The first page that held a non-finite row, and
// those behind it, stay in the sequence. Thread-safe.
class PublishLimit {
 public:
  PublishLimit() = default;
  // Goes on from `origin`, whose first `pages` pages are shared.
  PublishLimit(std::shared_ptr<const PublishLimit> origin, int pages)
      : origin_(std::move(origin)), origin_pages_(pages) {}

  void Damage(int page) {
    if (page < damaged_.load()) damaged_.store(page);
  }
  bool Withholds(int page) const {
    return page >= damaged_.load() || (origin_ != nullptr && origin_->Withholds(origin_pages_ - 1));
  }

 private:
  const std::shared_ptr<const PublishLimit> origin_;
  const int origin_pages_ = 0;
  std::atomic<int> damaged_{INT_MAX};
};

// A page whose tiles have been enqueued, and what is to become of it.
struct UnsettledPage {
  std::shared_ptr<DevicePage> page;     // its tile_sums and finite are set when it settles
  std::shared_ptr<const Page> wrapped;  // the same, of PageTable::Wrap
  std::shared_ptr<PublishLimit> line;
  std::shared_ptr<const KeyspaceBinding> keyspace;
  bool publish = false;
  // Of the prefix that its rows were computed over: those not yet known to be sound.
  std::vector<std::shared_ptr<const PrefixLoad>> loads;
};

// Looks at pages once the pass that wrote them has run: those that are fit become findable for
// other sequences and are published. Works in the background, in the order of the calls.
// Thread-safe.
class PageSettler {
 public:
  // `starter` and `background` are borrowed; the latter ends before this.
  static absl::StatusOr<std::unique_ptr<PageSettler>> Create(Device& device, size_t sink_bytes,
                                                             SequenceStarter& starter,
                                                             Background& background);

  // Window i of the launch that `results` belongs to became pages[i]. `moment` is the pass behind
  // the copy of the results; it has ended on the host.
  void Settle(const PassRef& moment, EvictResults::Table results, std::vector<UnsettledPage> pages);
  // A sink page whose last row the pass wrote.
  void SettleSink(const PassRef& moment, UnsettledPage page);

 private:
  PageSettler(Device& device, SequenceStarter& starter, Background& background)
      : device_(device), starter_(starter), background_(background) {}
  absl::Status LookAtSink(const PassRef& moment, const UnsettledPage& page);
  void Finish(const UnsettledPage& page);

  Device& device_;
  SequenceStarter& starter_;
  Background& background_;
  // For the sink, which no kernel sums up: used by the background thread only.
  OwnedStream stream_;
  OwnedEvent copied_;
  PinnedBuffer sink_;
};

}  // namespace crumb::client
