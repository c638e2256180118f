// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/flush_report.h"
#include "common/page_key.h"
#include "crumb/acquire.h"
#include "crumb/cache_stats.h"
#include "crumb/client_options.h"
#include "crumb/counters.h"
#include "crumb/keyspace_info.h"
#include "crumb/staging.h"

namespace crumb::client {

class PoolLink;

// A process's connection to crumbd. Thread-safe. One thread keeps the connection and sleeps while
// nothing happens; calls run on their callers' threads and end by their deadline. Without crumbd
// they answer kUnavailable at once, and the connection is tried again in the background. A forked
// child opens a connection of its own at its first call, or, when its parent had one (gRPC does not
// survive a fork), answers kUnavailable for good.
//
// Codes: kUnavailable no crumbd, try later; kDeadlineExceeded outcome unknown; kNotFound unknown
// keyspace; kResourceExhausted over a bound of crumbd's; kInvalidArgument the caller's mistake.
class Client {
 public:
  // Makes one attempt to connect, of connect_timeout at most; it need not succeed.
  // kInvalidArgument: an option.
  static absl::StatusOr<std::unique_ptr<Client>> Open(const ClientOptions& options);

  virtual ~Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  virtual bool connected() = 0;
  // Changes when crumbd restarts; 0 while not connected and over TCP.
  virtual uint64_t epoch() = 0;
  // Waits for a connection. False: none within `timeout`.
  virtual bool WaitConnected(Duration timeout) = 0;

  virtual absl::StatusOr<KeyspaceInfo> OpenKeyspace(const KeyspaceSpec& spec, Duration timeout) = 0;
  virtual absl::Status SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                        const std::string& who, const std::string& reason) = 0;
  // The newest state that crumbd has told of, here or on the session stream.
  virtual KeyspaceState StateOf(const KeyspaceId& keyspace) = 0;
  // The newest generation that crumbd has sent, here or on the session stream; 0: none. Pages of a
  // lower one were dropped.
  virtual uint64_t GenerationOf(const KeyspaceId&) { return 0; }

  // Leases the longest prefix that is there. A fragment that fails its check is a miss, and ends
  // the prefix.
  virtual absl::StatusOr<AcquireResult> Acquire(const AcquireRequest& request) = 0;
  // The same in two steps: this one sends. What the request points to stays until the result is
  // destroyed, and so does the client. A client that cannot send by itself does all in Finish.
  virtual std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request);
  // Tells where the longest prefix is, on other nodes too.
  virtual absl::StatusOr<LookupResult> Lookup(const KeyspaceId& keyspace,
                                              std::span<const PageKey> keys) = 0;

  // Up to `count` slots of `fragment_bytes`, fewer when staging memory is full. `pending` may be
  // empty.
  virtual absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                           const PendingPages& pending,
                                                           Duration timeout) = 0;
  absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                   Duration timeout) {
    return Reserve(count, fragment_bytes, {}, timeout);
  }
  // Makes fragments visible; `tiles_bytes` is the size of the tiles before each header. The slots
  // are given back whatever the result. kAborted: they belong to a connection that was lost.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::vector<StagingSlot> slots,
                                                            size_t tiles_bytes,
                                                            Duration timeout) = 0;

  // Waits until every page that was committed before, and that crumbd's SSD tier admits, is
  // durable, and returns how many pages are in all. Errors name how many are not and why:
  // kUnavailable the tier is absent, off or read-only; kResourceExhausted it has no room; kDataLoss
  // pages left memory before they were written, or crumbd was started again.
  virtual absl::StatusOr<uint64_t> Flush(Duration timeout) = 0;
  // The same in numbers: pages that are not durable are no error of the call, and
  // FlushReport::ToStatus makes one of them.
  virtual absl::StatusOr<FlushReport> FlushPages(Duration timeout);

  // Reads the fragments of `keys` up to the first miss, whose reason is answered.
  virtual absl::StatusOr<MissReason> Get(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                         Duration timeout, const FragmentReceiver& receiver) = 0;
  // Writes fragments whose headers carry key, range and sums. One outcome each.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Put(const KeyspaceId& keyspace,
                                                         std::span<const FragmentBytes> fragments,
                                                         Duration timeout) = 0;

  // Each answers the number of pages it was done to; Prefetch of those that other nodes are asked
  // for, too, though they may not have them.
  virtual absl::StatusOr<uint32_t> Prefetch(const KeyspaceId& keyspace,
                                            std::span<const PageKey> keys) = 0;
  virtual absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                       Duration ttl) = 0;
  virtual absl::StatusOr<uint32_t> Unpin(const KeyspaceId& keyspace,
                                         std::span<const PageKey> keys) = 0;
  virtual absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                          std::span<const PageKey> keys) = 0;
  // Answers the keyspace's new generation.
  virtual absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace) = 0;

  virtual absl::StatusOr<CacheStats> Stats() = 0;

  // The cluster. kFailedPrecondition: crumbd is in none; kNotFound: no such node or page.
  virtual absl::StatusOr<NodeList> ListNodes() = 0;
  // `keyspace` zeros: the one in which crumbd has the page.
  virtual absl::StatusOr<PageLocation> LocatePage(const KeyspaceId& keyspace,
                                                  const PageKey& key) = 0;
  // Makes a node leave, when it has pushed what it holds; ListNodes tells how far it is.
  virtual absl::Status DrainNode(const std::string& node) = 0;

  // Device pools; null without shared memory.
  virtual PoolLink* pools() { return nullptr; }

  // The memory of the connection that new leases and slots come from; null without one. It stays
  // mapped, and the session open, as long as the result is held. Another connection has another.
  virtual std::shared_ptr<const MappedMemory> mapped() { return nullptr; }

  // Adds to what is reported to crumbd, soon and in the background.
  virtual void Count(const SessionCounters& amounts) = 0;

 protected:
  Client() = default;
};

}  // namespace crumb::client
