// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "storage/store/promoter.h"

#include <algorithm>
#include <utility>

#include "common/status_macros.h"

namespace crumb::storage {

uint64_t Promoter::TurnsOf(uint64_t fragment_bytes) {
  return std::max<uint64_t>(1, (fragment_bytes + kBytesPerTurn - 1) / kBytesPerTurn);
}

Promoter::Name Promoter::NameOf(const FragmentMeta& fragment) {
  return {fragment.keyspace, fragment.key,
          uint32_t{fragment.range.layers.begin} << 16 | fragment.range.heads.begin};
}

void Promoter::Promote(const FragmentMeta& fragment, Done done) {
  const Name name = NameOf(fragment);
  Done suspended;
  {
    MutexLock lock(&mutex_);
    if (IsSuspended(fragment)) {
      suspended = std::move(done);
    } else {
      std::vector<Done>& waiting = under_way_[name];
      waiting.push_back(std::move(done));
      if (waiting.size() > 1) return;
    }
  }
  if (suspended) return suspended(absl::NotFoundError("the page is being deleted"));
  const auto read = [this, fragment, name, turns = TurnsOf(fragment.bytes)]() mutable {
    if (--turns > 0) return true;  // another tenant's turn is next
    const absl::StatusOr<PageHandle> page = Bring(fragment);
    Finish(name, page.status());
    if (page.ok()) host_.EndWrite(*page);
    return false;
  };
  const bool queued = readers_.SubmitSteps(host_.TenantOf(fragment.keyspace), read);
  if (queued) return;
  refused_.Add();
  Finish(name, absl::ResourceExhaustedError("too many reads wait for the SSD"));
}

absl::StatusOr<PageHandle> Promoter::Bring(const FragmentMeta& fragment) {
  CRUMB_ASSIGN_OR_RETURN(const Slot slot, writer_.Reserve(fragment.keyspace, fragment.bytes));
  if (absl::Status status = below_.Get(fragment, room_.Memory(slot)); !status.ok()) {
    room_.Abandon(slot);
    return status;
  }
  CRUMB_ASSIGN_OR_RETURN(const PageHandle page,
                         host_.Publish(fragment, slot, Below::kStored, /*owed=*/false));
  promoted_.Add();
  // The tier may have evicted the page meanwhile, and said so before it was here.
  if (!below_.Has(fragment)) host_.ForgetBelow(fragment.keyspace, fragment.key);
  return page;
}

void Promoter::Finish(const Name& name, const absl::Status& status) {
  std::vector<Done> waiting;
  {
    MutexLock lock(&mutex_);
    const auto found = under_way_.find(name);
    waiting = std::move(found->second);
    under_way_.erase(found);
    // No read begins after a suspension that covers it, so each was counted there.
    for (Suspension* const suspension : suspensions_) {
      if (!suspension->Covers(name.keyspace, name.key)) continue;
      if (--suspension->under_way_ == 0) suspension->ended_.NotifyAll();
    }
  }
  for (const Done& done : waiting) done(status);
}

void Promoter::DropStale(const FragmentMeta& fragment) {
  // When the queue is full the next reader that finds it submits it again.
  readers_.Submit(host_.TenantOf(fragment.keyspace), [this, fragment] {
    const std::vector<FragmentMeta> now = below_.Find(fragment.keyspace, fragment.key);
    if (now.empty() || now[0].generation != fragment.generation) return;
    // An error costs nothing: readers refuse the old generation, and the next one submits it again.
    below_.Remove(fragment.keyspace, std::span(&fragment.key, 1)).IgnoreError();
  });
}

bool Promoter::IsSuspended(const FragmentMeta& fragment) const {
  return std::any_of(suspensions_.begin(), suspensions_.end(), [&](const Suspension* suspension) {
    return suspension->Covers(fragment.keyspace, fragment.key);
  });
}

Promoter::Suspension::Suspension(Promoter& promoter, const KeyspaceId& keyspace,
                                 std::span<const PageKey> keys)
    : promoter_(promoter), keyspace_(keyspace), keys_(keys.begin(), keys.end()) {
  std::sort(keys_.begin(), keys_.end());
  MutexLock lock(&promoter_.mutex_);
  promoter_.suspensions_.push_back(this);
  for (const auto& [name, waiting] : promoter_.under_way_) {
    if (Covers(name.keyspace, name.key)) ++under_way_;
  }
  while (under_way_ > 0) ended_.Wait(&promoter_.mutex_);
}

Promoter::Suspension::~Suspension() {
  MutexLock lock(&promoter_.mutex_);
  std::erase(promoter_.suspensions_, this);
}

bool Promoter::Suspension::Covers(const KeyspaceId& keyspace, const PageKey& key) const {
  return keyspace == keyspace_ && std::binary_search(keys_.begin(), keys_.end(), key);
}

}  // namespace crumb::storage
