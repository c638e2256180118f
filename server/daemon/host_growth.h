// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "storage/tiered_store.h"

namespace crumb::server {

// Takes the host memory that was not to be had when crumbd started, as it becomes free: usually it
// is mapped by workers of a crumbd before. Its thread, crumb-memory, takes up to 256 MiB at a time,
// as much as is free then, and tries again every `interval`; it ends when nothing is missing.
// Without missing memory there is no thread. The daemon owns it.
class HostGrowth {
 public:
  // Bytes that may be taken now.
  using Room = std::function<uint64_t()>;

  // `store` must outlive this.
  HostGrowth(storage::TieredStore& store, Room room, Duration interval);
  ~HostGrowth();

 private:
  void Run();
  // Takes all that can be taken now. Returns false if nothing is missing any more.
  bool Take();

  storage::TieredStore& store_;
  const Room room_;
  const Duration interval_;
  Mutex mutex_;
  CondVar wake_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Thread thread_;
};

}  // namespace crumb::server
