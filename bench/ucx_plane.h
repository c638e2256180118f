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
#include "bench/measure.h"
#include "bench/servers_under_test.h"
#include "transport/transport.h"

namespace crumb::bench {

// Returns the options of both ends: the defaults, over TCP, on a free port of an address of this
// machine.
transport::TransportOptions UcxPlaneOptions(const std::string& address = "127.0.0.1");

// A source of whole fragments of a set, which are in memory as in slots. Immutable.
class FragmentSetSource final : public transport::FragmentSource {
 public:
  // Makes the slots of all pages, with their headers.
  FragmentSetSource(size_t fragment_bytes, size_t pages);

  void Acquire(transport::SourceRequest request, Reply reply) override;

 private:
  FragmentSet fragments_;
  std::vector<std::vector<std::byte>> slots_;
  std::unordered_map<PageKey, size_t> pages_;
};

// A process that serves fragments of one size, which the destructor ends.
class FragmentServer {
 public:
  // `program` is crumb-fragment-server. kUnavailable: it does not serve; the message has the end of
  // its log.
  static absl::StatusOr<std::unique_ptr<FragmentServer>> Start(const std::string& program,
                                                               size_t fragment_bytes, size_t pages);

  const std::string& address() const { return address_; }
  pid_t pid() const { return process_->pid(); }

 private:
  std::unique_ptr<ScratchFolder> folder_;
  std::unique_ptr<ChildProcess> process_;
  std::string address_;
};

// The memory into which fetches write: that of the fetches in flight, which stays in caches, or
// that of all pages.
enum class UcxRooms { kReused, kOnePerPage };

// Runs fetches of one fragment each, `in_flight` at a time: the end of a fetch starts the next one.
// Checksums are verified on arrival, as always. `server` is the address of a crumb-fragment-server,
// `here` this end's address. kDataLoss, kUnavailable: a fetch was not a hit.
absl::StatusOr<TimedCalls> RunUcxFetches(const TimedCallsOptions& options,
                                         const std::string& server, size_t fragment_bytes,
                                         size_t pages, size_t in_flight,
                                         const std::string& here = "127.0.0.1",
                                         UcxRooms rooms = UcxRooms::kReused);

}  // namespace crumb::bench
