// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"
#include "crumb/acquire.h"

namespace crumb::client {

// Leading pages of the requested fragments, and the reason why the next one is missing: kNotFound:
// its pool is no longer joined; kDataLoss: its fragment does not fit its slot.
struct HeldPages {
  std::vector<std::shared_ptr<Page>> pages;
  absl::Status status;
};

// PageIntake brings the pages of a fetched prefix to the memory where a GPU worker attends them.
// Thread-safe.
class PageIntake {
 public:
  virtual ~PageIntake() = default;

  // Returns true if some pages may be attended in place; otherwise all are copied.
  virtual bool attends_in_place() const = 0;
  // Adds the device pools whose fragments Hold accepts.
  virtual void NamePools(AcquireRequest* request) const = 0;
  // Returns pages for fragments in these pools, each of which has all of this rank's tiles. A page
  // is `placed` if sequences can read it in place; otherwise Prefix::Take copies it. The pages have
  // neither key nor position yet.
  virtual HeldPages Hold(std::span<const DeviceFragment* const> fragments,
                         const std::shared_ptr<const Lease>& lease) = 0;

  // A prefix that arrives part by part. Used by one thread at a time.
  class Prefix {
   public:
    // Completes the prefix: no more parts will come. The remaining copies are enqueued now and in
    // the background, and passes that use the pages wait for them.
    virtual ~Prefix() = default;
    // Takes the next pages, in prefix order, and returns them in the form that sequences read.
    // Returns fewer if there is no room for all; then this part is the last one.
    virtual std::vector<std::shared_ptr<Page>> Take(std::vector<std::shared_ptr<Page>> pages) = 0;
  };
  // Starts a prefix of at most `pages_max` pages.
  virtual std::unique_ptr<Prefix> NewPrefix(const std::shared_ptr<const KeyspaceBinding>& keyspace,
                                            int pages_max) = 0;
};

}  // namespace crumb::client
