// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/daemon/host_growth.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"

namespace crumb::server {
namespace {

// Bytes of one step. Free memory is checked again before the next one.
constexpr uint64_t kStepBytes = uint64_t{256} << 20;
constexpr uint64_t kStepBytesMin = uint64_t{1} << 20;

}  // namespace

HostGrowth::HostGrowth(storage::TieredStore& store, Room room, Duration interval)
    : store_(store), room_(std::move(room)), interval_(interval) {
  const absl::StatusOr<uint64_t> missing = store_.GrowHost(0);
  if (!missing.ok() || *missing == 0) return;
  LogInfo("host memory: {} bytes are to be taken or moved yet, as memory becomes free", *missing);
  thread_ = Thread("crumb-memory", [this] { Run(); });
}

HostGrowth::~HostGrowth() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    wake_.NotifyAll();
  }
  thread_.Join();
}

void HostGrowth::Run() {
  while (Take()) {
    const TimePoint again = Clock::Real().Now() + interval_;
    MutexLock lock(&mutex_);
    while (!stopping_ && wake_.WaitUntil(&mutex_, again)) {
    }
    if (stopping_) return;
  }
  LogInfo("host memory is there in full");
}

bool HostGrowth::Take() {
  // Without room nothing is taken, but pages may move and processes may have let slabs go.
  for (uint64_t before = UINT64_MAX;;) {
    const uint64_t room = room_();
    const absl::StatusOr<uint64_t> missing =
        store_.GrowHost(room >= kStepBytesMin ? std::min(room, kStepBytes) : 0);
    if (!missing.ok()) return true;  // another process took the memory first
    if (*missing == 0) return false;
    if (*missing >= before) return true;  // no progress: wait for the next interval
    before = *missing;
    MutexLock lock(&mutex_);
    if (stopping_) return true;
  }
}

}  // namespace crumb::server
