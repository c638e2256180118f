// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/device/slot_pool.h"
#include "client/device/timeline.h"
#include "client/page.h"

namespace crumb::client {

class PrefixLoad;

// A page in device memory: `tiles` is a device address that no host code reads.
struct DevicePage : Page {
  std::shared_ptr<const ResidentSlot> slot;
  std::shared_ptr<const PrefixLoad> load;  // what brings it; null: made here
  Moment written;                          // made here: the pass that writes its last tile

  DeviceAddress address() const { return slot->address; }
};

// The pages of a device worker's table and sequences are all of this kind.
inline const DevicePage& OnDevice(const Page& page) { return static_cast<const DevicePage&>(page); }

}  // namespace crumb::client
