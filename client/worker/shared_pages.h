// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/worker/page.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/acquire.h"
#include "crumb/staging.h"

namespace crumb::client {

// Leading pages of the requested fragments, and the reason why the next one is missing: kNotFound:
// its pool is no longer joined; kDataLoss: its fragment does not fit its slot.
struct HeldPages {
  std::vector<std::shared_ptr<Page>> pages;
  absl::Status status;
};

// SharedPages are the pages in memory that several workers attend: device pools. Pages become
// visible there where they were written, and hits are attended there without a copy. Thread-safe.
//
// WorkerPools implements it for GPU workers with device pools; other workers pass null.
class SharedPages {
 public:
  virtual ~SharedPages() = default;

  // Adds the device pools whose fragments Hold accepts.
  virtual void NamePools(AcquireRequest* request) const = 0;
  // Returns pages for fragments in these pools, each of which has all of this rank's tiles. A page
  // is `placed` if sequences can read it in place; otherwise PageIntake::Prefix::Take copies it.
  // The pages have neither key nor position yet.
  virtual HeldPages Hold(std::span<const DeviceFragment* const> fragments,
                         const std::shared_ptr<const Lease>& lease) = 0;

  // Returns whether the page lies in this memory.
  virtual bool Has(const Page& page) const = 0;
  // Returns whether its pages are to be published through staging memory as well.
  virtual bool copies() const = 0;
  // Commits pages for which Has returns true, with their headers. Codes as for Client::Commit.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(
      const KeyspaceId& keyspace, std::span<const std::shared_ptr<const Page>> pages,
      std::span<const FragmentHeader> headers, Duration timeout) = 0;
};

}  // namespace crumb::client
