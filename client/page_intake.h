// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/keyspace_binding.h"
#include "client/page.h"
#include "crumb/acquire.h"
#include "crumb/device_fragment.h"
#include "crumb/lease.h"

namespace crumb::client {

// Where the pages of a fetched prefix go before a sequence has them. Thread-safe.
class PageIntake {
 public:
  virtual ~PageIntake() = default;

  // Names the device pools whose fragments Hold takes.
  virtual void NamePools(AcquireRequest* request) const = 0;
  // A page of one fragment in such a pool that has all of this rank's tiles: `placed` if sequences
  // read it where it lies, else Take copies it. Has neither key nor position yet.
  // kNotFound: the pool is not joined any more; kDataLoss: the fragment does not fit its slot.
  virtual absl::StatusOr<std::shared_ptr<Page>> Hold(const DeviceFragment& fragment,
                                                     std::shared_ptr<const Lease> lease) = 0;

  // Takes `pages`, in prefix order, where crumbd or Hold has them; answers them as sequences are to
  // read them: fewer when there is no room for all.
  virtual std::vector<std::shared_ptr<Page>> Take(
      const std::shared_ptr<const KeyspaceBinding>& keyspace,
      std::vector<std::shared_ptr<Page>> pages) = 0;
};

}  // namespace crumb::client
