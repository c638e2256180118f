// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/fragment_header.h"
#include "common/page_key.h"
#include "transport/fetch.h"

namespace crumb::transport {

// What a peer asks for; untrusted.
struct SourceRequest {
  struct Page {
    PageKey key;
    TileRange range;
  };
  SessionToken session{};
  KeyspaceId keyspace;
  uint64_t generation = 0;
  std::vector<Page> pages;
  TimePoint deadline;  // after which nobody waits
  std::string peer;    // address of the connection, for logs
};

// A fragment where it lies: whole tiles, then its encoded header (docs/formats/fragment.md), as in
// a slot.
struct SourceFragment {
  std::span<const std::byte> bytes;
  TileRange range;
  uint32_t tile_bytes = 0;

  std::span<const std::byte> tiles() const {
    return bytes.first(FragmentTilesBytes(range.tiles(), tile_bytes));
  }
  std::span<const std::byte> header() const {
    return bytes.subspan(FragmentTilesBytes(range.tiles(), tile_bytes));
  }
};

struct SourcePage {
  PageStatus status = PageStatus::kAbsent;
  // kHit: fragments that cover the wanted range; only tiles inside it are sent.
  std::vector<SourceFragment> fragments;
};

struct SourceAnswer {
  std::vector<SourcePage> pages;  // one per page of the request, in order
  // Keeps the fragments' bytes where they are. Dropped on the progress thread when the last send
  // has completed or its connection was closed by force: the destructor must not block.
  std::shared_ptr<const void> lease;
};

// The serving side of a transport: checks who asks, and leases what is there. Thread-safe.
class FragmentSource {
 public:
  using Reply = std::function<void(SourceAnswer)>;

  virtual ~FragmentSource() = default;

  // Called on the progress thread: must not block. Calls `reply` exactly once, from here or later
  // from any thread; after the transport stopped, `reply` does nothing but drop the answer.
  virtual void Acquire(SourceRequest request, Reply reply) = 0;
};

}  // namespace crumb::transport
