// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "crumb/client.h"

namespace crumb::client {

// ForwardingClient passes all calls to another client, which it borrows. Tests derive from it to
// inject a fault into one call.
class ForwardingClient : public Client {
 public:
  explicit ForwardingClient(Client& to) : to_(to) {}

  bool connected() override { return to_.connected(); }
  uint64_t epoch() override { return to_.epoch(); }
  bool WaitConnected(Duration timeout) override { return to_.WaitConnected(timeout); }
  absl::StatusOr<KeyspaceInfo> OpenKeyspace(const KeyspaceSpec& spec, Duration timeout) override {
    return to_.OpenKeyspace(spec, timeout);
  }
  absl::Status SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                const std::string& who, const std::string& reason) override {
    return to_.SetKeyspaceState(keyspace, state, who, reason);
  }
  KeyspaceState StateOf(const KeyspaceId& keyspace) override { return to_.StateOf(keyspace); }
  absl::StatusOr<AcquireResult> Acquire(const AcquireRequest& request) override {
    return StartAcquire(request)->Finish();
  }
  std::unique_ptr<PendingAcquire> StartAcquire(const AcquireRequest& request) override {
    return to_.StartAcquire(request);
  }
  absl::StatusOr<LookupResult> Lookup(const KeyspaceId& keyspace,
                                      std::span<const PageKey> keys) override {
    return to_.Lookup(keyspace, keys);
  }
  absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                   const PendingPages& pending,
                                                   Duration timeout) override {
    return to_.Reserve(count, fragment_bytes, pending, timeout);
  }
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                    std::vector<StagingSlot> slots,
                                                    size_t tiles_bytes, Duration timeout) override {
    return to_.Commit(keyspace, std::move(slots), tiles_bytes, timeout);
  }
  absl::StatusOr<uint64_t> Flush(Duration timeout) override { return to_.Flush(timeout); }
  absl::StatusOr<MissReason> Get(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                                 Duration timeout, const FragmentReceiver& receiver) override {
    return to_.Get(keyspace, keys, timeout, receiver);
  }
  absl::StatusOr<std::vector<CommitOutcome>> Put(const KeyspaceId& keyspace,
                                                 std::span<const FragmentBytes> fragments,
                                                 Duration timeout) override {
    return to_.Put(keyspace, fragments, timeout);
  }
  absl::StatusOr<uint32_t> Prefetch(const KeyspaceId& keyspace,
                                    std::span<const PageKey> keys) override {
    return to_.Prefetch(keyspace, keys);
  }
  absl::StatusOr<uint32_t> Pin(const KeyspaceId& keyspace, std::span<const PageKey> keys,
                               Duration ttl) override {
    return to_.Pin(keyspace, keys, ttl);
  }
  absl::StatusOr<uint32_t> Unpin(const KeyspaceId& keyspace,
                                 std::span<const PageKey> keys) override {
    return to_.Unpin(keyspace, keys);
  }
  absl::StatusOr<uint32_t> Delete(const KeyspaceId& keyspace,
                                  std::span<const PageKey> keys) override {
    return to_.Delete(keyspace, keys);
  }
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId& keyspace) override {
    return to_.DropKeyspace(keyspace);
  }
  absl::StatusOr<CacheStats> Stats() override { return to_.Stats(); }
  absl::StatusOr<NodeList> ListNodes() override { return to_.ListNodes(); }
  absl::StatusOr<PageLocation> LocatePage(const KeyspaceId& keyspace, const PageKey& key) override {
    return to_.LocatePage(keyspace, key);
  }
  absl::Status DrainNode(const std::string& node) override { return to_.DrainNode(node); }
  PoolLink* pools() override { return to_.pools(); }
  std::shared_ptr<const MappedMemory> mapped() override { return to_.mapped(); }
  void Count(const SessionCounters& amounts) override { to_.Count(amounts); }

 private:
  Client& to_;
};

}  // namespace crumb::client
