// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <random>
#include <vector>

#include "crumb/client.h"
#include "crumb/worker_options.h"

namespace crumb::bench {

// A client whose crumbd has every page: a few host pages of random tiles with the right checksums,
// which it returns for all keys. Committed pages are dropped. Benches use it to time the worker
// alone.
class EndlessClient final : public client::Client {
 public:
  // It has `pages` different pages of the options' geometry.
  EndlessClient(const client::WorkerOptions& options, int pages, uint32_t seed);

  // Returns the number of committed pages.
  uint64_t committed() const { return committed_.load(); }

  bool connected() override { return true; }
  uint64_t epoch() override { return 1; }
  bool WaitConnected(Duration) override { return true; }
  absl::StatusOr<client::KeyspaceInfo> OpenKeyspace(const client::KeyspaceSpec& spec,
                                                    Duration timeout) override;
  absl::Status SetKeyspaceState(const KeyspaceId&, client::KeyspaceState, const std::string&,
                                const std::string&) override;
  client::KeyspaceState StateOf(const KeyspaceId&) override {
    return client::KeyspaceState::kActive;
  }
  absl::StatusOr<client::AcquireResult> Acquire(const client::AcquireRequest& request) override;
  absl::StatusOr<client::LookupResult> Lookup(const KeyspaceId&, std::span<const PageKey>) override;
  absl::StatusOr<std::vector<client::StagingSlot>> Reserve(int count, size_t fragment_bytes,
                                                           const client::PendingPages&,
                                                           Duration timeout) override;
  absl::StatusOr<std::vector<client::CommitOutcome>> Commit(const KeyspaceId& keyspace,
                                                            std::vector<client::StagingSlot> slots,
                                                            size_t tiles_bytes,
                                                            Duration timeout) override;
  absl::StatusOr<uint64_t> Flush(Duration) override;
  absl::StatusOr<client::MissReason> Get(const KeyspaceId&, std::span<const PageKey>, Duration,
                                         const client::FragmentReceiver&) override;
  absl::StatusOr<std::vector<client::CommitOutcome>> Put(const KeyspaceId&,
                                                         std::span<const client::FragmentBytes>,
                                                         Duration) override;
  absl::StatusOr<uint32_t> Prefetch(const KeyspaceId&, std::span<const PageKey>) override;
  absl::StatusOr<uint32_t> Pin(const KeyspaceId&, std::span<const PageKey>, Duration) override;
  absl::StatusOr<uint32_t> Unpin(const KeyspaceId&, std::span<const PageKey>) override;
  absl::StatusOr<uint32_t> Delete(const KeyspaceId&, std::span<const PageKey>) override;
  absl::StatusOr<uint64_t> DropKeyspace(const KeyspaceId&) override;
  absl::StatusOr<client::CacheStats> Stats() override;
  absl::StatusOr<client::NodeList> ListNodes() override;
  absl::StatusOr<client::PageLocation> LocatePage(const KeyspaceId&, const PageKey&) override;
  absl::Status DrainNode(const std::string&) override;
  std::shared_ptr<const client::MappedMemory> mapped() override { return mapped_; }
  void Count(const client::SessionCounters&) override {}

 private:
  struct StoredPage {
    std::span<const std::byte> tiles;
    FragmentHeader header;
    std::vector<uint32_t> tile_sums;
  };
  // Makes a page of random tiles, with their checksums, in memory at `at`.
  StoredPage MakePage(std::byte* at, PageFormat format, std::mt19937_64& random) const;

  const client::WorkerOptions options_;
  std::vector<std::byte> memory_;   // the sink page and the other pages
  std::vector<std::byte> staging_;  // used as a ring
  StoredPage sink_;
  std::vector<StoredPage> pages_;
  std::shared_ptr<client::MappedMemory> mapped_ = std::make_shared<client::MappedMemory>();
  std::atomic<uint64_t> reserved_{0};
  std::atomic<uint64_t> committed_{0};
};

}  // namespace crumb::bench
