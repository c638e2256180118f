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

// Client is a process's connection to crumbd.
//
// One thread keeps the connection alive and sleeps while nothing happens. Calls run on their
// callers' threads and end by their deadline. Without crumbd every call returns kUnavailable at
// once, and the thread reconnects in the background. After a fork, a child opens a connection of
// its own with its first call; if the parent had a connection already, calls of the child return
// kUnavailable for good, because gRPC does not survive a fork. Thread-safe.
//
// Codes of all calls: kUnavailable: there is no crumbd, try later. kDeadlineExceeded: the outcome
// is unknown. kNotFound: the keyspace is unknown. kResourceExhausted: a bound of crumbd's is
// reached. kInvalidArgument: the caller's mistake.
class Client {
 public:
  // Makes one attempt to connect, which takes connect_timeout at most and need not succeed.
  // kInvalidArgument names the option that is wrong.
  static absl::StatusOr<std::unique_ptr<Client>> Open(const ClientOptions& options);

  virtual ~Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  virtual bool connected() = 0;
  // Returns a number that changes when crumbd restarts; 0 while disconnected and over TCP.
  virtual uint64_t epoch() = 0;
  // Blocks until there is a connection. Returns false if there is none within `timeout`.
  virtual bool WaitConnected(Duration timeout) = 0;

  // Returns the id, state and tile sizes of the keyspace that `spec` describes, and creates it if
  // crumbd does not know it.
  virtual absl::StatusOr<KeyspaceInfo> OpenKeyspace(const KeyspaceSpec& spec, Duration timeout) = 0;
  virtual absl::Status SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                        const std::string& who, const std::string& reason) = 0;
  // Returns the newest state that crumbd has sent, in a response or on the session stream.
  virtual KeyspaceState StateOf(const KeyspaceId& keyspace) = 0;
  // Returns the newest generation that crumbd has sent, in a response or on the session stream, or
  // 0 if it has sent none. Pages of lower generations were dropped.
  virtual uint64_t GenerationOf(const KeyspaceId&) { return 0; }

  // Leases the longest cached prefix of the request's keys. A fragment that fails a check is a miss
  // and ends the prefix.
  virtual absl::StatusOr<AcquireResult> Acquire(const AcquireRequest& request) = 0;
  // Sends an Acquire and returns without waiting for the response. The client and the memory that
  // the request refers to must outlive the result. The default implementation does all the work in
  // Finish.
  virtual std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request);
  // Returns where the longest cached prefix of `keys` is, including other nodes. Leases nothing.
  virtual absl::StatusOr<LookupResult> Lookup(const KeyspaceId& keyspace,
                                              std::span<const PageKey> keys) = 0;

  // Reserves up to `count` slots of `fragment_bytes` each; fewer if staging memory is full.
  // `pending` names the pages that will be written, and may be empty.
  virtual absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                           const PendingPages& pending,
                                                           Duration timeout) = 0;
  absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                   Duration timeout) {
    return Reserve(count, fragment_bytes, {}, timeout);
  }
  // Makes fragments visible; `tiles_bytes` is the size of the tiles in front of each header. crumbd
  // takes the slots back whatever the outcome. kAborted: the connection of the slots was lost.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::vector<StagingSlot> slots,
                                                            size_t tiles_bytes,
                                                            Duration timeout) = 0;
  // Sends a Commit and returns without waiting for the response, so that the caller can write the
  // next slots while crumbd copies these. The client must outlive the result. The default
  // implementation does all the work here.
  virtual std::unique_ptr<PendingCommit> StartCommit(const KeyspaceId& keyspace,
                                                     std::vector<StagingSlot> slots,
                                                     size_t tiles_bytes, Duration timeout);

  // Blocks until every page that was committed before, and that crumbd's SSD tier admits, is
  // durable. Returns the number of durable pages. Errors name how many pages are not durable and
  // why: kUnavailable: the tier is absent, off or read-only; kResourceExhausted: it has no room;
  // kDataLoss: pages left memory before they were written, or crumbd was restarted.
  virtual absl::StatusOr<uint64_t> Flush(Duration timeout) = 0;
  // Does the same as Flush but returns numbers: pages that are not durable are not an error of the
  // call. FlushReport::ToStatus turns them into one.
  virtual absl::StatusOr<FlushReport> FlushPages(Duration timeout);

  // Reads the fragments of `keys` up to the first miss and returns the reason of that miss.
  virtual absl::StatusOr<MissReason> Get(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                         Duration timeout, const FragmentReceiver& receiver) = 0;
  // Writes fragments whose headers have key, range and checksums. Returns one outcome per fragment.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Put(const KeyspaceId& keyspace,
                                                         std::span<const FragmentBytes> fragments,
                                                         Duration timeout) = 0;

  // Prefetch, Pin, Unpin and Delete return the number of pages that they affected. Prefetch also
  // counts pages that it requests from other nodes, which may not have them.
  virtual absl::StatusOr<uint32_t> Prefetch(const KeyspaceId& keyspace,
                                            std::span<const PageKey> keys) = 0;
  virtual absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                       Duration ttl) = 0;
  virtual absl::StatusOr<uint32_t> Unpin(const KeyspaceId& keyspace,
                                         std::span<const PageKey> keys) = 0;
  virtual absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                          std::span<const PageKey> keys) = 0;
  // Drops all pages of the keyspace and returns its new generation.
  virtual absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace) = 0;

  // Returns crumbd's capacities, contents and counters.
  virtual absl::StatusOr<CacheStats> Stats() = 0;

  // ListNodes, LocatePage and DrainNode concern the cluster. kFailedPrecondition: crumbd is in
  // none; kNotFound: no such node or page.
  virtual absl::StatusOr<NodeList> ListNodes() = 0;
  // If `keyspace` is all zeros, crumbd searches the keyspaces for one that has the page.
  virtual absl::StatusOr<PageLocation> LocatePage(const KeyspaceId& keyspace,
                                                  const PageKey& key) = 0;
  // Makes a node leave once it has pushed the pages that it holds; ListNodes returns the progress.
  virtual absl::Status DrainNode(const std::string& node) = 0;

  // Returns the interface to device pools; null without shared memory.
  virtual PoolLink* pools() { return nullptr; }

  // Returns the memory that new leases and slots of the current connection lie in; null without
  // one. It stays mapped, and the session open, as long as the result is held. Each connection has
  // its own.
  virtual std::shared_ptr<const MappedMemory> mapped() { return nullptr; }

  // Adds to the counters that the client reports to crumbd in the background.
  virtual void Count(const SessionCounters& amounts) = 0;

 protected:
  Client() = default;
};

}  // namespace crumb::client
