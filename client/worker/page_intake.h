// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <vector>

#include "client/worker/keyspace_binding.h"
#include "client/worker/page.h"

namespace crumb::client {

// PageIntake brings the pages of a fetched prefix to the memory where a GPU worker attends them:
// those that are not placed there already. Thread-safe.
//
// CPU workers have none: they read pages where crumbd has them. PrefixLoader is the implementation
// of GPU workers.
class PageIntake {
 public:
  virtual ~PageIntake() = default;

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
