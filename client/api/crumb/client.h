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
//
// Two planes carry the calls. Over the Unix socket the process shares memory with crumbd: Acquire
// returns addresses in crumbd's slabs, and Reserve and Commit write through the session's staging
// memory, so that no page is copied through a socket. Over TCP (ClientOptions::address) only the
// calls that carry bytes or numbers work; Acquire, Reserve and Commit return kFailedPrecondition.
//
// A page's way through the client:
//
//     write:  Reserve -> StagingSlot (tiles, header) -> Commit -> visible -> Flush -> durable
//     read:   Acquire -> Lease (addresses) -> attend in place -> ~Lease -> evictable again
//
// Leases and slots that the client gave out may be destroyed on any thread, also while crumbd is
// absent: their return is queued, and the connection's thread sends it.
class Client {
 public:
  // Makes one attempt to connect, which takes connect_timeout at most and need not succeed. Starts
  // the connection's thread, except over TCP. kInvalidArgument names the option that is wrong:
  // neither socket_dir nor address is set, an engine id that has not 16 bytes, a timeout that is
  // not positive, or TLS without address or with files that cannot be used.
  static absl::StatusOr<std::unique_ptr<Client>> Open(const ClientOptions& options);

  virtual ~Client() = default;
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  // Returns whether a session is open now. A call may still fail: the connection can break at any
  // time. Over TCP, returns whether gRPC's channel is ready.
  virtual bool connected() = 0;
  // Returns a number that changes when crumbd restarts; 0 while disconnected and over TCP. Lease
  // ids are valid within one epoch only, and a restarted crumbd may count generations from a lower
  // number again.
  virtual uint64_t epoch() = 0;
  // Blocks until there is a connection. Returns false if there is none within `timeout`.
  virtual bool WaitConnected(Duration timeout) = 0;

  // Returns the id, state and tile sizes of the keyspace that `spec` describes, and creates it if
  // crumbd does not know it. Idempotent: every process that sends equal fields and sizes gets the
  // same id, which page keys are hashed with. crumbd writes a record of a new keyspace before it
  // responds.
  virtual absl::StatusOr<KeyspaceInfo> OpenKeyspace(const KeyspaceSpec& spec, Duration timeout) = 0;
  // Switches INT2 pages of a keyspace off (kBf16) or on again (kActive) for all processes. The
  // state survives restarts; sessions are notified over their streams. `who` and `reason` are
  // recorded for operators.
  virtual absl::Status SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                        const std::string& who, const std::string& reason) = 0;
  // Returns the newest state that crumbd has sent, in a response or on the session stream.
  // kUnknown: the keyspace was not opened by this client yet, or the client uses TCP. Does not
  // block and sends nothing.
  virtual KeyspaceState StateOf(const KeyspaceId& keyspace) = 0;
  // Returns the newest generation that crumbd has sent, in a response or on the session stream, or
  // 0 if it has sent none. Pages of lower generations were dropped. Also 0 over TCP. Does not block
  // and sends nothing.
  virtual uint64_t GenerationOf(const KeyspaceId&) { return 0; }

  // Leases the longest cached prefix of the request's keys. A fragment that fails a check is a miss
  // and ends the prefix. An absent page is not an error: the result has fewer hit pages and the
  // reason. kAborted: AcquireRequest::lease_epoch names another crumbd than the connected one. If
  // the call times out, the lease that crumbd may still grant is returned in the background.
  virtual absl::StatusOr<AcquireResult> Acquire(const AcquireRequest& request) = 0;
  // Sends an Acquire and returns without waiting for the response. The client and the memory that
  // the request refers to must outlive the result. The default implementation does all the work in
  // Finish.
  virtual std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request);
  // Returns where the longest cached prefix of `keys` is, including other nodes. Leases nothing.
  // The pages may be evicted before the caller reads them.
  virtual absl::StatusOr<LookupResult> Lookup(const KeyspaceId& keyspace,
                                              std::span<const PageKey> keys) = 0;

  // Reserves up to `count` slots of `fragment_bytes` each; fewer if staging memory is full.
  // `pending` names the pages that will be written, and may be empty. An empty result means that no
  // room is free now. Room of a Reserve that timed out is returned in the background. The slots
  // belong to the present connection: after it is lost, they can only be destroyed.
  virtual absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                           const PendingPages& pending,
                                                           Duration timeout) = 0;
  absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                   Duration timeout) {
    return Reserve(count, fragment_bytes, {}, timeout);
  }
  // Makes fragments visible; `tiles_bytes` is the size of the tiles in front of each header. crumbd
  // takes the slots back whatever the outcome. kAborted: the connection of the slots was lost.
  // Outcome i is that of slots[i]; a refused fragment does not affect the others. REQUIRES: each
  // slot contains tiles_bytes bytes of tiles and behind them the encoded header
  // (EncodeFragmentHeader), and all tiles are written.
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
  // kDataLoss: pages left memory before they were written, or crumbd was restarted. A Flush covers
  // the pages that were lost since this client's previous Flush, so that none goes unreported. It
  // is a disk write: use it at checkpoints, not per page.
  virtual absl::StatusOr<uint64_t> Flush(Duration timeout) = 0;
  // Does the same as Flush but returns numbers: pages that are not durable are not an error of the
  // call. FlushReport::ToStatus turns them into one.
  virtual absl::StatusOr<FlushReport> FlushPages(Duration timeout);

  // Reads the fragments of `keys` as bytes and passes them to `receiver`, in the order of the keys,
  // up to the first miss. Returns the reason of that miss; kNone: all pages were read. Each
  // fragment's key, keyspace and checksums are verified before `receiver` gets it; kDataLoss: one
  // is damaged. About a tenth of `timeout` is kept for the transfer, the rest is crumbd's limit for
  // reads of lower tiers and other nodes.
  virtual absl::StatusOr<MissReason> Get(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                         Duration timeout, const FragmentReceiver& receiver) = 0;
  // Writes fragments as bytes. Their headers have key, range and one checksum per tile, which
  // crumbd verifies. Returns one outcome per fragment, in order. kInvalidArgument: the size of a
  // fragment's tiles, or the number of its checksums, does not fit its header; then none was sent.
  virtual absl::StatusOr<std::vector<CommitOutcome>> Put(const KeyspaceId& keyspace,
                                                         std::span<const FragmentBytes> fragments,
                                                         Duration timeout) = 0;

  // Prefetch, Pin, Unpin and Delete return the number of pages that they affected; absent pages are
  // skipped.
  //
  // Prefetch starts to bring pages from the SSD and from other nodes to host memory and returns at
  // once. It also counts pages that it requests from other nodes, which may not have them.
  // kResourceExhausted: too many prefetches are in progress.
  virtual absl::StatusOr<uint32_t> Prefetch(const KeyspaceId& keyspace,
                                            std::span<const PageKey> keys) = 0;
  // Protects pages of this node from eviction for `ttl`, after fetching those of other nodes. A pin
  // is not a lease: Delete removes pinned pages, and a pin does not give access to memory.
  virtual absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                       Duration ttl) = 0;
  // Ends pins before their time.
  virtual absl::StatusOr<uint32_t> Unpin(const KeyspaceId& keyspace,
                                         std::span<const PageKey> keys) = 0;
  // Removes pages from every tier of this node and from the other nodes. Leased pages are not
  // served any more, and their memory is freed when the last lease ends. kUnavailable: the pages
  // are not served any more, but the removal is not durable yet, and a restart may bring them back;
  // repeat the call.
  virtual absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                          std::span<const PageKey> keys) = 0;
  // Drops all pages of the keyspace and returns its new generation. Copies of older generations are
  // never served again, also by nodes that are absent now. Sequences that are under way keep their
  // leased pages; pages that they publish afterwards are refused.
  virtual absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace) = 0;

  // Returns crumbd's capacities, contents and counters. The numbers of different fields are not of
  // exactly one moment.
  virtual absl::StatusOr<CacheStats> Stats() = 0;

  // ListNodes, LocatePage and DrainNode concern the cluster and are meant for operators' tools.
  // kFailedPrecondition: crumbd is in none; kNotFound: no such node or page.
  virtual absl::StatusOr<NodeList> ListNodes() = 0;
  // If `keyspace` is all zeros, crumbd searches the keyspaces for one that has the page.
  virtual absl::StatusOr<PageLocation> LocatePage(const KeyspaceId& keyspace,
                                                  const PageKey& key) = 0;
  // Makes a node leave once it has pushed the pages that it holds; ListNodes returns the progress.
  virtual absl::Status DrainNode(const std::string& node) = 0;

  // Returns the interface to device pools; null without shared memory. It is borrowed from the
  // client and concerns this process only; after a fork, call again.
  virtual PoolLink* pools() { return nullptr; }

  // Returns the memory that new leases and slots of the current connection lie in; null without
  // one. It stays mapped, and the session open, as long as the result is held. Each connection has
  // its own. Once called, slabs that crumbd drops stay mapped for the caller's sake until the
  // connection is destroyed: call it only to pin the memory for a device.
  virtual std::shared_ptr<const MappedMemory> mapped() { return nullptr; }

  // Adds to the counters that the client reports to crumbd in the background. Does not block.
  // Amounts are sent once per counters_interval; over TCP they are ignored. A quality sample is
  // dropped when 4,096 wait to be sent.
  virtual void Count(const SessionCounters& amounts) = 0;

 protected:
  Client() = default;
};

}  // namespace crumb::client
