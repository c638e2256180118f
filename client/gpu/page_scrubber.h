// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device_geometry.h"
#include "client/gpu/device_page.h"
#include "client/gpu/page_check.h"
#include "client/gpu/worker_pools.h"
#include "client/worker/page_table.h"
#include "client/worker/worker_tally.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/client.h"

namespace crumb::client {

// PageScrubber verifies again, in device memory, the checksums of pages that sequences attend: some
// pages of every prefix soon after it begins, and all pages of the worker in turn (a lap), up to a
// number of pages per second. It has a thread and a stream of its own. A damaged page is not given
// to further sequences, neither by this worker nor, if it lies in a device pool, by crumbd.
// Sequences that attend it see its `damaged` flag. Thread-safe.
//
// Half of each round's pages are offered ones, the rest continues the lap. Checksums come from the
// page itself, or from crumbd for pages that other workers wrote; the page is not held while crumbd
// is waited for. The queue of offered pages has 1,024 entries.
class PageScrubber {
 public:
  // Everything is borrowed.
  struct Parts {
    Device& device;
    const DeviceGeometry& geometry;
    PageTable& table;          // the pages of the worker
    const WorkerPools* pools;  // null: there are no pools
    Client* client;            // null: there is no crumbd
    WorkerTally& tally;
  };
  static absl::StatusOr<std::unique_ptr<PageScrubber>> Create(const Parts& parts,
                                                              int pages_per_second);
  // Ends the round under way.
  ~PageScrubber();

  // Offers the pages with which a sequence begins: one of `every` pages, at an offset that changes
  // from call to call, is checked soon. 0: none. Pages beyond the bound of the queue are counted
  // and left to a lap.
  void Offer(std::span<const std::shared_ptr<const Page>> pages, uint32_t every);
  // Returns how many damaged pages were found.
  uint64_t damages() const { return damages_.load(std::memory_order_acquire); }

 private:
  using Pages = std::vector<std::weak_ptr<const Page>>;
  // A page and its expected checksums.
  struct Item {
    std::weak_ptr<const Page> page;
    std::vector<uint32_t> sums;
  };

  PageScrubber(const Parts& parts, int pages_per_second);
  // The thread (crumb-scrub): a round, then a pause of `interval_`, or of a second without pages.
  void Run();
  // Waits until the next round is due. Returns false if the scrubber is stopping.
  bool Wait();
  // Checks the pages of one round and returns their number.
  size_t Round();
  // Chooses the pages of a round; it begins a new lap when the last one is over.
  Pages Choose();
  // Returns the lap's next page that a sequence still holds; null: the lap is over.
  std::shared_ptr<const Page> NextOfLap();
  // Returns those pages that have arrived and whose checksums are known, from this worker or from
  // crumbd, with these. AddFromCrumbd adds the latter.
  std::vector<Item> Gather(const Pages& pages) const;
  void AddFromCrumbd(const Pages& pages, std::vector<Item>* items) const;
  // Takes a damaged page out of the worker's table, marks it, and reports it if it lies in a pool.
  void Withdraw(const std::shared_ptr<const Page>& page);
  // Reports damaged pages to crumbd; those for which it does not respond are reported later.
  void ReportDamage();

  const Parts parts_;
  const size_t round_pages_;
  const Duration interval_;  // time between two rounds
  std::atomic<uint64_t> damages_{0};
  std::atomic<uint32_t> turn_{0};

  // Members that only the thread uses.
  std::unique_ptr<PageCheck> check_;
  std::vector<PageKey> lap_;  // keys of the present lap that are still to be checked
  TimePoint due_;
  // damaged pages that crumbd does not know of yet
  std::deque<std::shared_ptr<const Page>> unreported_;

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::weak_ptr<const Page>> offered_ ABSL_GUARDED_BY(mutex_);
  bool idle_ ABSL_GUARDED_BY(mutex_) = false;  // the last round found no page to check
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::client
