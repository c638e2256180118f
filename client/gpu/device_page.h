// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <memory>

#include "client/gpu/device/timeline.h"
#include "client/gpu/pools/slot_pool.h"
#include "client/worker/page.h"

namespace crumb::client {

class PrefixLoad;

// Set by one thread, looked at by others, which see what was done before. Copied as it is.
class Flag {
 public:
  Flag() = default;
  Flag(const Flag& other) : set_(other.is_set()) {}
  Flag& operator=(const Flag&) = delete;
  void Set() const { set_.store(true, std::memory_order_release); }
  bool is_set() const { return set_.load(std::memory_order_acquire); }

 private:
  mutable std::atomic<bool> set_{false};
};

// A page in device memory: `tiles` is a device address that no host code reads.
struct DevicePage : Page {
  std::shared_ptr<const SlotRef> slot;
  std::shared_ptr<const PrefixLoad> load;  // what brings it; null: made here
  PassRef written;                         // made here: the pass that writes its last tile
  Flag has_sums;                           // tile_sums are there, and stay as they are
  Flag damaged;                            // its bytes are not what was written

  DeviceAddress address() const { return slot->address; }
};

// The pages of a device worker's table and sequences are all of this kind.
inline const DevicePage& OnDevice(const Page& page) { return static_cast<const DevicePage&>(page); }

}  // namespace crumb::client
