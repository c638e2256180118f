// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/child_process.h"
#include "bench/fragment_set.h"
#include "bench/servers_under_test.h"
#include "bench/timed_calls.h"
#include "transport/transport.h"

namespace crumb::bench {

// Both ends' settings: the defaults, over TCP, on a free port of an address of this machine.
transport::TransportOptions UcxPlaneOptions(const std::string& address = "127.0.0.1");

// Whole fragments of a set, side by side in memory as in slots. Immutable.
class FragmentSetSource final : public transport::FragmentSource {
 public:
  FragmentSetSource(size_t fragment_bytes, size_t pages);

  void Acquire(transport::SourceRequest request, Reply reply) override;

 private:
  FragmentSet fragments_;
  std::vector<std::vector<std::byte>> slots_;
  std::unordered_map<PageKey, size_t> pages_;
};

// A process that serves the fragments of one size; ended with this object.
class FragmentServer {
 public:
  // `program` is crumb-fragment-server. kUnavailable, with the end of its log: it does not serve.
  static absl::StatusOr<std::unique_ptr<FragmentServer>> Start(const std::string& program,
                                                               size_t fragment_bytes, size_t pages);

  const std::string& address() const { return address_; }
  pid_t pid() const { return process_->pid(); }

 private:
  std::unique_ptr<ScratchFolder> folder_;
  std::unique_ptr<ChildProcess> process_;
  std::string address_;
};

// Where fetches write: as much memory as is under way, which stays in caches, or as all pages take.
enum class UcxRooms { kReused, kOnePerPage };

// Fetches of one fragment each, `in_flight` at a time: whoever ends starts the next one. Sums are
// verified on arrival, as always. `server` is where a crumb-fragment-server listens, `here` this
// end's address. kDataLoss, kUnavailable: a fetch was no hit.
absl::StatusOr<TimedCalls> RunUcxFetches(const TimedCallsOptions& options,
                                         const std::string& server, size_t fragment_bytes,
                                         size_t pages, size_t in_flight,
                                         const std::string& here = "127.0.0.1",
                                         UcxRooms rooms = UcxRooms::kReused);

}  // namespace crumb::bench
