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
#include "storage/fragment_tier.h"
#include "storage/host_tier.h"
#include "storage/write_through.h"

namespace crumb::storage {

// Brings fragments from the tier below into host memory, each once however many ask for it at a
// time. Thread-safe.
class Promoter {
 public:
  // Called once, on a reader thread or, when there is no room to queue, inside Promote. With kOk
  // the fragment is in host memory and stays there until the call returns.
  using Done = std::function<void(const absl::Status&)>;

  // `readers` runs the reads; stop it before this goes.
  Promoter(HostTier& host, FragmentTier& below, WriteThrough& writer, Executor& readers)
      : host_(host), below_(below), writer_(writer), readers_(readers) {}

  // Errors: those of FragmentTier::Get; kResourceExhausted: no slot, or too many reads wait.
  void Promote(const FragmentMeta& fragment, Done done);

  // Removes the page from the tier below, in the background, unless a newer generation of it has
  // come.
  void DropStale(const FragmentMeta& fragment);

  // Blocks until no promotion of these pages is under way.
  void WaitFor(const KeyspaceId& keyspace, std::span<const PageKey> keys);

  uint64_t promoted() const { return promoted_.value(); }

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

  static Name NameOf(const FragmentMeta& fragment);
  absl::StatusOr<PageHandle> Bring(const FragmentMeta& fragment);
  void Finish(const Name& name, const absl::Status& status);

  HostTier& host_;
  FragmentTier& below_;
  WriteThrough& writer_;
  Executor& readers_;
  Counter promoted_;

  Mutex mutex_;
  CondVar ended_;
  absl::flat_hash_map<Name, std::vector<Done>> under_way_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace crumb::storage
