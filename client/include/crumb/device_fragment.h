// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "common/fragment_header.h"

namespace crumb::client {

// Names a pool of device memory; random, chosen by crumbd, and kept when crumbd restarts.
struct PoolId {
  std::array<uint8_t, 16> bytes{};

  std::string ToBytes() const { return {reinterpret_cast<const char*>(bytes.data()), 16}; }
  // Zeros unless `text` has 16 bytes.
  static PoolId FromBytes(std::string_view text) {
    PoolId id;
    if (text.size() == id.bytes.size()) std::memcpy(id.bytes.data(), text.data(), text.size());
    return id;
  }
  friend bool operator==(const PoolId&, const PoolId&) = default;
};

// A fragment that lies in a slot of a device pool. A slot holds tiles only; the header is crumbd's.
struct DeviceFragment {
  int page = 0;  // index into the keys of the Acquire
  PoolId pool;
  uint64_t slot = 0;
  FragmentHeader header;  // with tile sums only where they were asked for, and of peers
};

}  // namespace crumb::client
