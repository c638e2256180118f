// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "crumb/client.h"

namespace crumb::client {

// MemoryClient is a Client whose crumbd is a map in this process. It has no sockets and no gRPC, so
// that sanitizers see all of it. Calls that workers do not make return kUnimplemented. Thread-safe.
class MemoryClient final : public Client {
 public:
  std::atomic<bool> up{true};
  // Generation of every keyspace; commits with another one are refused.
  std::atomic<uint64_t> generation{1};
  std::atomic<bool> reports_drops{true};  // false: GenerationOf returns 0
  PoolLink* link = nullptr;               // the result of pools()

  MemoryClient() = default;
  // Pages lie in one slab, as long as it has room; mapped() returns it.
  explicit MemoryClient(size_t slab_bytes);

  size_t pages() const;
  // All stored fragments by key: the encoded header, then the tiles.
  std::map<PageKey, std::string> contents() const;
  // Changes a byte of a stored page's last tile. Returns false if the page is absent.
  bool Damage(const PageKey& key);
  size_t leases() const { return leases_->load(); }
  // The open keyspaces that hold INT2 pages.
  std::vector<KeyspaceId> int2_keyspaces() const;
  // The Acquires so far.
  struct Request {
    uint32_t first_page = 0;
    std::vector<PageKey> keys;
    uint32_t window_tokens = 0;
    bool behind_miss = false;
  };
  std::vector<Request> requests() const;
  // Called before each Acquire, with the number of Acquires before it. REQUIRES: it is set while no
  // Acquire runs.
  std::function<void(size_t)> before_acquire;
  // Makes pages of these keys misses from now on; keys hidden before are hits again.
  void Hide(const std::vector<PageKey>& keys);

  // All samples that were counted.
  std::vector<QualitySample> quality() const;

  bool connected() override { return up; }
  uint64_t epoch() override { return up ? 1 : 0; }
  bool WaitConnected(Duration) override { return up; }
  absl::StatusOr<KeyspaceInfo> OpenKeyspace(const KeyspaceSpec& spec, Duration timeout) override;
  KeyspaceState StateOf(const KeyspaceId& keyspace) override;
  uint64_t GenerationOf(const KeyspaceId&) override {
    return reports_drops ? generation.load() : 0;
  }
  // Drops every keyspace.
  void Drop();
  // The generations of all stored fragments, by key.
  std::map<PageKey, uint64_t> generations() const;
  absl::StatusOr<AcquireResult> Acquire(const AcquireRequest& request) override;
  absl::StatusOr<std::vector<StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                   const PendingPages& pending,
                                                   Duration timeout) override;
  absl::StatusOr<std::vector<CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                    std::vector<StagingSlot> slots,
                                                    size_t tiles_bytes, Duration timeout) override;
  void Count(const SessionCounters& counters) override;
  std::shared_ptr<const MappedMemory> mapped() override { return mapped_; }
  PoolLink* pools() override { return link; }

  absl::Status SetKeyspaceState(const KeyspaceId& keyspace, KeyspaceState state,
                                const std::string& by, const std::string& reason) override;
  absl::StatusOr<LookupResult> Lookup(const KeyspaceId&, std::span<const PageKey>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint64_t> Flush(Duration) override { return absl::UnimplementedError(""); }
  absl::StatusOr<MissReason> Get(const KeyspaceId&, std::span<const PageKey>, Duration,
                                 const FragmentReceiver&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<std::vector<CommitOutcome>> Put(const KeyspaceId&, std::span<const FragmentBytes>,
                                                 Duration) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> Prefetch(const KeyspaceId&, std::span<const PageKey>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> Pin(const KeyspaceId&, std::span<const PageKey>, Duration) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> Unpin(const KeyspaceId&, std::span<const PageKey>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint32_t> Delete(const KeyspaceId&, std::span<const PageKey>) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId&) override {
    return absl::UnimplementedError("");
  }
  absl::StatusOr<CacheStats> Stats() override { return absl::UnimplementedError(""); }
  absl::StatusOr<NodeList> ListNodes() override { return absl::UnimplementedError(""); }
  absl::StatusOr<PageLocation> LocatePage(const KeyspaceId&, const PageKey&) override {
    return absl::UnimplementedError("");
  }
  absl::Status DrainNode(const std::string&) override { return absl::UnimplementedError(""); }

 private:
  struct Stored {
    std::shared_ptr<std::byte> bytes;
    FragmentHeader header;
    size_t tiles_bytes = 0;
  };

  std::shared_ptr<std::byte> NewSlot(size_t bytes);

  std::shared_ptr<MappedMemory> mapped_;  // owns its memory
  std::atomic<size_t> slab_used_{0};
  mutable Mutex mutex_;
  std::map<std::pair<KeyspaceId, PageKey>, Stored> pages_ ABSL_GUARDED_BY(mutex_);
  std::map<KeyspaceId, KeyspaceState> states_ ABSL_GUARDED_BY(mutex_);
  std::vector<KeyspaceId> int2_ ABSL_GUARDED_BY(mutex_);
  std::vector<QualitySample> quality_ ABSL_GUARDED_BY(mutex_);
  std::vector<Request> requests_ ABSL_GUARDED_BY(mutex_);
  std::set<PageKey> hidden_ ABSL_GUARDED_BY(mutex_);
  const std::shared_ptr<std::atomic<size_t>> leases_ = std::make_shared<std::atomic<size_t>>(0);
};

}  // namespace crumb::client
