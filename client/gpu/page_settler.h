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

// PublishLimit is the index of a sequence's first page with a non-finite row, if there is one. That
// page and those behind it are not published. Thread-safe.
class PublishLimit {
 public:
  PublishLimit() = default;
  // Continues from `origin`, whose first `pages` pages this sequence has too.
  PublishLimit(std::shared_ptr<const PublishLimit> origin, int pages)
      : origin_(std::move(origin)), origin_pages_(pages) {}

  // Notes a damaged page; later ones than the first have no effect.
  void Damage(int page) {
    int first = damaged_.load();
    while (page < first && !damaged_.compare_exchange_weak(first, page)) {
    }
  }
  // Returns whether the page must not be published, here or because of the origin's pages.
  bool Withholds(int page) const {
    return page >= damaged_.load() || (origin_ != nullptr && origin_->Withholds(origin_pages_ - 1));
  }

 private:
  const std::shared_ptr<const PublishLimit> origin_;
  const int origin_pages_ = 0;
  std::atomic<int> damaged_{INT_MAX};
};

// A page whose tiles have been enqueued, with the data to publish it once they are written.
struct UnsettledPage {
  std::shared_ptr<DevicePage> page;     // its tile_sums and `finite` are set when it settles
  std::shared_ptr<const Page> wrapped;  // the result of PageTable::Wrap for the page
  std::shared_ptr<PublishLimit> line;
  std::shared_ptr<const KeyspaceBinding> keyspace;
  bool publish = false;
  // Loads of the prefix that its rows were computed over, if not yet known to be undamaged.
  std::vector<std::shared_ptr<const PrefixLoad>> loads;
};

// PageSettler reads the results of pages once the pass that wrote them is done. It makes finite
// pages findable for other sequences and publishes them. It works in the background, in the order
// of the calls. Thread-safe.
//
// written (enqueued) --pass done--> settled: sums and finiteness known --> findable and queued for
// publishing, or withheld (non-finite row, damaged load, sequence behind such a page)
//
// A page over a load that is not checked yet waits for the load's Settle.
class PageSettler {
 public:
  // `starter` and `background` are borrowed. REQUIRES: `background` is destroyed before this.
  static absl::StatusOr<std::unique_ptr<PageSettler>> Create(Device& device, size_t sink_bytes,
                                                             SequenceStarter& starter,
                                                             Background& background);

  // Settles the windows of a launch: window i became pages[i], and `results` are its results.
  // `moment` is the pass of the copy of the results, which has ended.
  void Settle(const PassRef& moment, EvictResults::Table results, std::vector<UnsettledPage> pages);
  // Settles a sink page whose last row the pass wrote.
  void SettleSink(const PassRef& moment, UnsettledPage page);

 private:
  PageSettler(Device& device, SequenceStarter& starter, Background& background)
      : device_(device), starter_(starter), background_(background) {}
  // Copies a sink to the host, computes its checksums, and checks that its rows are finite.
  absl::Status CheckSink(const PassRef& moment, const UnsettledPage& page);
  // Makes a settled page findable and queues it for publishing, or withholds it.
  void Finish(const UnsettledPage& page);

  Device& device_;
  SequenceStarter& starter_;
  Background& background_;
  // Members for the sink, whose checksums no kernel computes; used by the background thread only.
  OwnedStream stream_;
  OwnedEvent copied_;
  PinnedBuffer sink_;
};

}  // namespace crumb::client
