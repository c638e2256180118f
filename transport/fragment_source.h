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

// A peer's request, whose values are not to be trusted.
struct SourceRequest {
  struct Page {
    PageKey key;
    TileRange range;
  };
  SessionToken session{};
  KeyspaceId keyspace;
  uint64_t generation = 0;
  std::vector<Page> pages;
  TimePoint deadline;  // after it the peer does not wait any more
  std::string peer;    // address of the connection, for logs
};

// A fragment in place: whole tiles followed by the encoded header, as in a slot
// (docs/formats/fragment.md).
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
  // kHit: fragments that cover the requested range; only the tiles inside it are sent.
  std::vector<SourceFragment> fragments;
};

struct SourceResponse {
  std::vector<SourcePage> pages;  // one per page of the request, in order
  // Keeps the fragments' bytes in place. It is dropped on the progress thread when the last send
  // has completed or its connection was closed by force. REQUIRES: its destructor does not block.
  std::shared_ptr<const void> lease;
};

// The source of the fragments that a transport serves. It authorizes a request and leases the pages
// that are present. Thread-safe.
//
// The lease of a response keeps slots in place while their bytes are being sent. The requester is
// not trusted: keys, ranges and generation may have any values.
class FragmentSource {
 public:
  using Reply = std::function<void(SourceResponse)>;

  virtual ~FragmentSource() = default;

  // Called on the progress thread. REQUIRES: it does not block, and it calls `reply` exactly once,
  // from here or later from any thread. After the transport stopped, `reply` only drops the
  // response.
  virtual void Acquire(SourceRequest request, Reply reply) = 0;
};

}  // namespace crumb::transport
