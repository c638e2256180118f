// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <atomic>
#include <memory>

#include "client/rpc/connection.h"
#include "client/rpc/reconnector.h"
#include "client/rpc/remote_pools.h"
#include "crumb/client.h"

namespace crumb::client {

// RemoteClient is the Client that talks to crumbd: see Client for the contract. remote_calls.cc has
// the calls that share memory: Acquire, Reserve and Commit.
//
// It owns one Link per process: the reconnector with its thread, or a TCP channel. A forked child
// leaks the parent's link on purpose, because its locks may be held by threads that the child does
// not have.
class RemoteClient final : public Client {
 public:
  explicit RemoteClient(const ClientOptions& options);
  ~RemoteClient() override;

  bool connected() override;
  uint64_t epoch() override;
  bool WaitConnected(Duration timeout) override;
  absl::StatusOr<KeyspaceInfo> OpenKeyspace(const KeyspaceSpec& spec, Duration timeout) override;
  absl::Status SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                const std::string& who, const std::string& reason) override;
  KeyspaceState StateOf(const KeyspaceId& keyspace) override;
  uint64_t GenerationOf(const KeyspaceId& keyspace) override;
  absl::StatusOr<AcquireResult> Acquire(const AcquireRequest& request) override;
  std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request) override;
  absl::StatusOr<LookupResult> Lookup(const KeyspaceId& keyspace,
                                      std::span<const PageKey> keys) override;
  absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                   const PendingPages& pending,
                                                   Duration timeout) override;
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                    std::vector<StagingSlot> slots,
                                                    size_t tiles_bytes, Duration timeout) override;
  std::unique_ptr<PendingCommit> StartCommit(const KeyspaceId& keyspace,
                                             std::vector<StagingSlot> slots, size_t tiles_bytes,
                                             Duration timeout) override;
  absl::StatusOr<uint64_t> Flush(Duration timeout) override;
  absl::StatusOr<FlushReport> FlushPages(Duration timeout) override;
  absl::StatusOr<MissReason> Get(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                 Duration timeout, const FragmentReceiver& receiver) override;
  absl::StatusOr<std::vector<CommitOutcome>> Put(const KeyspaceId& keyspace,
                                                 std::span<const FragmentBytes> fragments,
                                                 Duration timeout) override;
  absl::StatusOr<uint32_t> Prefetch(const KeyspaceId& keyspace,
                                    std::span<const PageKey> keys) override;
  absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                               Duration ttl) override;
  absl::StatusOr<uint32_t> Unpin(const KeyspaceId& keyspace,
                                 std::span<const PageKey> keys) override;
  absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override;
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace) override;
  absl::StatusOr<CacheStats> Stats() override;
  absl::StatusOr<NodeList> ListNodes() override;
  absl::StatusOr<PageLocation> LocatePage(const KeyspaceId& keyspace, const PageKey& key) override;
  absl::Status DrainNode(const std::string& node) override;
  std::shared_ptr<const MappedMemory> mapped() override;
  PoolLink* pools() override;
  void Count(const SessionCounters& amounts) override;

 private:
  // The connection of one process: a reconnector, or a TCP connection, or neither if gRPC cannot be
  // used.
  struct Link {
    pid_t pid = 0;
    std::shared_ptr<Reconnector> reconnector;
    std::shared_ptr<Connection> tcp;
    std::unique_ptr<RemotePools> pools;  // set if there is a reconnector
  };

  Link* MakeLink() const;
  // Returns the link of this process. In a forked child the first call creates it and abandons the
  // parent's, whose locks and threads are in an unknown state.
  Link& CurrentLink();
  std::shared_ptr<Connection> CurrentConnection();  // null if there is none
  absl::StatusOr<std::shared_ptr<Connection>> Connected();
  template <typename Request, typename Response>
  absl::Status Call(const Request& request, Response* response, Duration timeout);
  template <typename Request, typename Response>
  absl::StatusOr<Response> KeysCall(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                    Request request);

  // Notes the flush mark of a commit: the next Flush reports the pages lost since the lowest mark.
  void NoteMark(uint64_t mark);
  void RestoreMark(uint64_t since);
  static constexpr uint64_t kNothingCommitted = UINT64_MAX;

  const ClientOptions options_;
  std::atomic<Link*> link_;
  // Value of FlushRequest.since: the mark of the first commit since the last Flush,
  // kNothingCommitted after a Flush, and 0 before the first commit.
  std::atomic<uint64_t> flush_since_{0};
  std::atomic<uint32_t> verify_offset_{0};
  std::atomic<uint64_t> last_request_{0};
};

}  // namespace crumb::client
