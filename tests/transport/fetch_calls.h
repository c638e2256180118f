// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tests/transport/sample_source.h"
#include "transport/transport.h"

namespace crumb::transport {

// The memory into which a test fetches pages, and the bytes that are expected in it.
class Destination {
 public:
  // Requests tiles of a page of SampleSource, with `gap` bytes after each tile.
  void Want(int page, const TileRange& range, uint32_t tile_bytes, size_t gap = 0);

  // Returns the request for all these pages, which keeps this memory alive.
  FetchRequest Request() const;
  // Returns the first page that has a wrong byte, or whose gaps were written; -1 if there is none.
  int FirstWrong(const std::vector<PageResponse>& responses) const;
  // Returns whether nothing else refers to the memory.
  bool released() const { return memory_.use_count() == 1; }

 private:
  struct Want_ {
    int page;
    TileRange range;
    uint32_t tile_bytes;
    size_t gap;
    std::vector<std::byte> bytes;
  };
  std::shared_ptr<std::vector<Want_>> memory_ = std::make_shared<std::vector<Want_>>();
};

// A fetch that a test waits for.
class PendingFetch {
 public:
  PendingFetch(Transport& transport, const std::string& address, FetchRequest request);

  const absl::Status& status() const { return status_; }
  FetchId id() const { return id_; }
  bool done() const;
  // Waits for half a minute at most, after which it returns a response without pages.
  FetchResponse Wait();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<FetchResponse> response;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  absl::Status status_;
  FetchId id_ = 0;
};

std::vector<PageStatus> StatusesOf(const FetchResponse& response);
}  // namespace crumb::transport
