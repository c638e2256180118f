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

// Looks again at pages that are attended where they lie: whether their tiles still have the sums
// that they were made with. Some of every prefix soon after it begins, and all that the worker
// holds, one lap after the other; never more pages a second than it was told. Its thread and stream
// are its own. A page that is damaged is given to nobody any more, in this worker and,
// where it lies in a device pool, by crumbd; sequences that attend it hear of it by its mark.
// Thread-safe.
class PageScrubber {
 public:
  // All borrowed.
  struct Parts {
    Device& device;
    const DeviceGeometry& geometry;
    PageTable& table;          // of the pages that the worker holds
    const WorkerPools* pools;  // null: none
    Client* client;            // null: none
    WorkerTally& tally;
  };
  static absl::StatusOr<std::unique_ptr<PageScrubber>> Create(const Parts& parts,
                                                              int pages_per_second);
  // Ends the round that is under way.
  ~PageScrubber();

  // The pages that a sequence begins with: one of `every` is looked at soon, another one each time.
  // 0: none. Bounded: what there is no room for is counted, and has its turn in a lap.
  void Offer(std::span<const std::shared_ptr<const Page>> pages, uint32_t every);
  // How many damaged pages were found.
  uint64_t damages() const { return damages_.load(std::memory_order_acquire); }

 private:
  using Pages = std::vector<std::weak_ptr<const Page>>;
  // A page with the sums that it should have.
  struct Item {
    std::weak_ptr<const Page> page;
    std::vector<uint32_t> sums;
  };

  PageScrubber(const Parts& parts, int pages_per_second);
  void Run();
  bool Wait();
  // Answers how many pages there were to look at.
  size_t Round();
  Pages Choose();
  std::shared_ptr<const Page> NextOfLap();
  std::vector<Item> Gather(const Pages& pages) const;
  void AddFromCrumbd(const Pages& pages, std::vector<Item>* items) const;
  void Withdraw(const std::shared_ptr<const Page>& page);
  void ReportDamage();

  const Parts parts_;
  const size_t round_pages_;
  const Duration interval_;  // of rounds
  std::atomic<uint64_t> damages_{0};
  std::atomic<uint32_t> turn_{0};

  // The thread's.
  std::unique_ptr<PageCheck> check_;
  std::vector<PageKey> lap_;  // to come
  TimePoint due_;
  std::deque<std::shared_ptr<const Page>> unreported_;  // damaged, and crumbd does not know yet

  Mutex mutex_;
  CondVar changed_;
  std::deque<std::weak_ptr<const Page>> offered_ ABSL_GUARDED_BY(mutex_);
  bool idle_ ABSL_GUARDED_BY(mutex_) = false;  // nothing was there to look at
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::client
