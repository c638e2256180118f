// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "storage/host/host_state.h"

namespace crumb::storage {

// Fragments of host memory that wait to be written to the tier below, in a queue that is fair
// between tenants. Not thread-safe: its owner's lock covers it.
//
// Room. The queue is bounded in fragments and in bytes, and a tenant may have at most its part of
// both: a percentage of the room that the other tenants do not use (TenantPart). A tenant without a
// queued fragment may queue one while there is any room, however small its part is.
//
// Order. Each fragment has a cost, the part of a batch that it takes. The next fragment is that of
// the tenant whose fragments have cost least, and of one tenant the one that was queued first. A
// tenant that had nothing in the queue begins with the cost at which the queue has arrived, so it
// neither waits for the fragments of others nor catches up on the time of its absence. If the
// server does not distinguish tenants, all fragments are those of one tenant, and leave in the
// order in which they were queued.
//
// Numbers. Fragments are numbered in the order in which they are queued, so that a Flush can find
// out whether all those have left that were queued before it.
//
// Cost. Each call costs O(log n) per fragment in the number of tenants in the queue.
class DepartureQueue {
 public:
  // A batch ends with the fragment that reaches one of these. One sync for each extent covers a
  // batch: large enough to be cheap, small enough to be soon.
  static constexpr size_t kBatchFragmentsMax = 64;
  static constexpr uint64_t kBatchBytesMax = uint64_t{64} << 20;

  struct Options {
    size_t fragments_max = 0;
    uint64_t bytes_max = 0;
    // The percentage of both that one tenant may have. At 100 the server does not distinguish
    // tenants, and every fragment counts for the tenant "".
    int64_t part_max_percent = 100;
  };

  explicit DepartureQueue(const Options& options) : options_(options) {}
  DepartureQueue(const DepartureQueue&) = delete;

  // Queues a fragment of the tenant. Returns false, and does not, if there is no room for it.
  bool Push(const std::string& tenant, const Departure& departure);
  // The bytes that the tenant may queue now; 0 also if it may queue no further fragment.
  uint64_t RoomBytes(const std::string& tenant) const;

  // Takes the next fragments out, up to a batch; `batch` is emptied first.
  void TakeBatch(std::vector<Departure>* batch);
  std::vector<Departure> TakeAll();

  // The number that the next fragment gets.
  uint64_t end() const { return end_; }
  // Whether a fragment with a number below `end` waits: of any tenant, or of this one.
  bool HasBefore(uint64_t end) const { return !fronts_.empty() && *fronts_.begin() < end; }
  bool HasBefore(const std::string& tenant, uint64_t end) const;

  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  uint64_t bytes() const { return bytes_; }

 private:
  struct Entry {
    uint64_t number = 0;
    Departure departure;
  };
  // A tenant with fragments in the queue.
  struct Tenant {
    std::deque<Entry> waiting;  // never empty
    uint64_t bytes = 0;
    uint64_t cost = 0;  // the cost at which its first fragment begins
  };
  using Tenants = std::map<std::string, Tenant>;
  // The tenants in the order of their turns: by cost, and at the same cost by the number of their
  // first fragment.
  using Turns = std::map<std::pair<uint64_t, uint64_t>, Tenants::iterator>;

  static uint64_t CostOf(const Departure& departure);
  // The tenant under whose name the fragments of `tenant` wait.
  const std::string& NameOf(const std::string& tenant) const;
  void Wait(Tenants::iterator tenant);

  const Options options_;
  Tenants tenants_;
  Turns turns_;
  std::set<uint64_t> fronts_;  // numbers of the tenants' first fragments
  size_t size_ = 0;
  uint64_t bytes_ = 0;
  uint64_t end_ = 0;
  uint64_t cost_ = 0;  // the cost at which the last fragment that left began
};

}  // namespace crumb::storage
