// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "common/fragment_header.h"
#include "transport/frame.h"

namespace crumb::server {

// The versions of crumb.v1.PeerService that this release of crumbd supports.
inline constexpr uint32_t kWireMin = 1;
inline constexpr uint32_t kWireMax = 1;

// The protocol versions that a node supports. Tests of upgrades set others than this release's.
struct ProtocolVersions {
  uint32_t wire_min = kWireMin;
  uint32_t wire_max = kWireMax;
  uint32_t layout_id = FragmentHeader().layout_id;  // layout of page tiles
  transport::FrameVersions frames = {};             // versions of UCX frames; sent in its hellos
};

}  // namespace crumb::server
