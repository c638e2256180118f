// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/worker/page.h"
#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "crumb/staging.h"

namespace crumb::client {

// InPlaceCommitter makes pages visible in the memory where they were written, which other workers
// can read: a device pool. Thread-safe.
class InPlaceCommitter {
 public:
  virtual ~InPlaceCommitter() = default;

  virtual bool Has(const Page& page) const = 0;
  // Returns whether its pages are to be published through staging memory as well.
  virtual bool copies() const = 0;
  // Commits pages for which Has returns true, with their headers. Codes as for Client::Commit.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(
      const KeyspaceId& keyspace, std::span<const std::shared_ptr<const Page>> pages,
      std::span<const FragmentHeader> headers, Duration timeout) = 0;
};

}  // namespace crumb::client
