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

// Flag is set by one thread and read by others, which then see all writes before Set. Copyable.
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

// DevicePage is a page in device memory: `tiles` is a device address, which host code must not
// read.
//
// A page is made here or loaded here. It is shared with other sequences only once it has settled,
// except pages of a fetched prefix, which passes attend before they are checked: the pass that
// completes the prompt then reports damage.
struct DevicePage : Page {
  std::shared_ptr<const SlotRef> slot;
  std::shared_ptr<const PrefixLoad> load;  // the load that copies it here; null: made here
  PassRef written;                         // if made here: the pass that writes its last tile
  Flag has_sums;                           // tile_sums are complete and do not change any more
  Flag damaged;                            // its bytes are not those that were written

  DeviceAddress address() const { return slot->address; }
};

// Downcasts a page of a GPU worker's table or sequences, which are all DevicePages.
inline const DevicePage& OnDevice(const Page& page) { return static_cast<const DevicePage&>(page); }

}  // namespace crumb::client
