// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "common/mutex.h"
#include "common/placement.h"

namespace crumb::server {

// The nodes that are homes, as of one epoch. Sorted by id. Immutable; nodes that drain are no
// homes.
struct View {
  uint64_t epoch = 0;
  std::vector<PlacementNode> nodes;
};

// The two newest views. Pages are pushed to the homes of the newest, and looked for at those of
// both, so that one change of the cluster loses no hit. Thread-safe.
class ViewHistory {
 public:
  struct Views {
    std::shared_ptr<const View> current;   // never null
    std::shared_ptr<const View> previous;  // never null; empty at first
  };

  ViewHistory();

  // Makes `nodes` the newest view. Returns false, and does not, if it has the same nodes already,
  // or if it is not empty and `epoch` is older than its epoch.
  bool Install(uint64_t epoch, std::vector<PlacementNode> nodes);

  // Returns both views as of one moment.
  Views views() const;

 private:
  mutable Mutex mutex_;
  Views views_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::server
