// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/executor.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "storage/bounds.h"
#include "storage/fragment_tier.h"
#include "storage/host/host_room.h"
#include "storage/host/host_tier.h"
#include "storage/store/write_through.h"

namespace crumb::storage {

// Brings fragments from the tier below into host memory, each once however many request it at a
// time. Thread-safe.
//
// Reads of several tenants are fair in bytes. The executor gives each tenant one turn in rotation,
// and a turn stands for kBytesPerTurn: a read of a larger fragment lets as many turns of its tenant
// pass as it has further such pieces before it begins. A smaller fragment takes a whole turn,
// because a device needs about as long to find it as to read that much. If no other tenant waits,
// the turns pass at once.
class Promoter {
 public:
  // Bytes of a fragment that are read in one turn of a tenant.
  static constexpr uint64_t kBytesPerTurn = kTypicalPageBytes;

  // Called once, on a reader thread or, when there is no room to queue, inside Promote. With kOk
  // the fragment is in host memory and stays there until the call returns.
  using Done = std::function<void(const absl::Status&)>;

  // `readers` runs the reads, each for the tenant of its page; stop it before this goes.
  Promoter(HostTier& host, HostRoom& room, FragmentTier& below, WriteThrough& writer,
           Executor& readers)
      : host_(host), room_(room), below_(below), writer_(writer), readers_(readers) {}

  // Errors: those of FragmentTier::Get; kNotFound: the page is being deleted; kResourceExhausted:
  // no slot, or too many reads wait, of all tenants or of the page's.
  void Promote(const FragmentMeta& fragment, Done done);

  // Removes the page from the tier below, in the background, unless a newer generation of it has
  // come.
  void DropStale(const FragmentMeta& fragment);

  // Ends the promotion of pages that are being deleted: blocks until none of them is under way, and
  // refuses others as long as this lives. Otherwise a page that was read before it was removed from
  // the tier below would come back, and could even be written there again.
  class Suspension {
   public:
    Suspension(Promoter& promoter, const KeyspaceId& keyspace, std::span<const PageKey> keys);
    ~Suspension();
    Suspension(const Suspension&) = delete;
    Suspension& operator=(const Suspension&) = delete;

    bool Covers(const KeyspaceId& keyspace, const PageKey& key) const;

   private:
    friend class Promoter;

    Promoter& promoter_;
    const KeyspaceId keyspace_;
    std::vector<PageKey> keys_;  // sorted
    CondVar ended_;
    size_t under_way_ = 0;  // promotions that this covers; guarded by Promoter::mutex_
  };

  uint64_t promoted() const { return promoted_.value(); }
  // Reads for which the queue had no place.
  uint64_t refused() const { return refused_.value(); }

 private:
  struct Name {
    KeyspaceId keyspace;
    PageKey key;
    uint32_t corner = 0;  // first layer and head: fragments of a page do not overlap

    friend bool operator==(const Name&, const Name&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const Name& name) {
      return H::combine(std::move(h), name.key, name.corner);
    }
  };

  bool IsSuspended(const FragmentMeta& fragment) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static uint64_t TurnsOf(uint64_t fragment_bytes);
  static Name NameOf(const FragmentMeta& fragment);
  absl::StatusOr<PageHandle> Bring(const FragmentMeta& fragment);
  void Finish(const Name& name, const absl::Status& status);

  HostTier& host_;
  HostRoom& room_;
  FragmentTier& below_;
  WriteThrough& writer_;
  Executor& readers_;
  Counter promoted_;
  Counter refused_;

  Mutex mutex_;
  absl::flat_hash_map<Name, std::vector<Done>> under_way_ ABSL_GUARDED_BY(mutex_);
  std::vector<Suspension*> suspensions_ ABSL_GUARDED_BY(mutex_);  // one for each Delete
};

}  // namespace crumb::storage
