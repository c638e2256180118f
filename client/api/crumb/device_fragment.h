// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>

#include "common/fragment_header.h"

namespace crumb::client {

// Names a device in every process and container of the host.
struct DeviceUuid {
  std::array<uint8_t, 16> bytes{};

  std::string ToBytes() const { return {reinterpret_cast<const char*>(bytes.data()), 16}; }
  friend bool operator==(const DeviceUuid&, const DeviceUuid&) = default;
};

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
// What it points to is valid while its lease lives.
struct DeviceFragment {
  int page = 0;  // index into the keys of the Acquire
  PoolId pool;
  uint64_t slot = 0;
  // What fragments of one shape have in common: all but key, parent, position and tile sums.
  const FragmentHeader* shape = nullptr;
  // Only where they were asked for, and of peers: the header as EncodeFragmentHeader writes it, and
  // the tile sums in it. With AcquireRequest::peer_sums no header, and the sums of those tiles.
  std::span<const std::byte> header;
  std::span<const uint32_t> tile_sums;
};

}  // namespace crumb::client
