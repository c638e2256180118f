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

// Leading pages of those asked for, and why the next one is none: kNotFound, its pool is not joined
// any more; kDataLoss, its fragment does not fit its slot.
struct HeldPages {
  std::vector<std::shared_ptr<Page>> pages;
  absl::Status status;
};

// Where the pages of a fetched prefix go before a sequence has them. Thread-safe.
class PageIntake {
 public:
  virtual ~PageIntake() = default;

  // Whether a page may be attended where it lies. Else all are copied.
  virtual bool attends_in_place() const = 0;
  // Names the device pools whose fragments Hold takes.
  virtual void NamePools(AcquireRequest* request) const = 0;
  // Pages of one fragment each, in such pools, that have all of this rank's tiles: `placed` where
  // sequences read them where they lie, else Take copies them. Have neither key nor position yet.
  virtual HeldPages Hold(std::span<const DeviceFragment* const> fragments,
                         const std::shared_ptr<const Lease>& lease) = 0;

  // A prefix on its way in, part by part. One thread at a time.
  class Prefix {
   public:
    // The last part was taken: what is left to do for all of them is done now and in the
    // background. Passes that use its pages wait for that.
    virtual ~Prefix() = default;
    // Takes the next pages, in prefix order, where crumbd or Hold has them; answers them as
    // sequences are to read them: fewer when there is no room for all, and then it is the last
    // part.
    virtual std::vector<std::shared_ptr<Page>> Take(std::vector<std::shared_ptr<Page>> pages) = 0;
  };
  // Of `pages_max` pages at most.
  virtual std::unique_ptr<Prefix> NewPrefix(const std::shared_ptr<const KeyspaceBinding>& keyspace,
                                            int pages_max) = 0;
};

}  // namespace crumb::client
