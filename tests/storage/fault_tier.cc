// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/fault_tier.h"

#include <algorithm>

#include "common/status_macros.h"

namespace crumb::storage {

void FaultTier::Set(Fault fault) {
  MutexLock lock(&mutex_);
  fault_ = fault;
  changed_.NotifyAll();
}

void FaultTier::LimitTo(std::optional<KeyspaceId> keyspace) {
  MutexLock lock(&mutex_);
  limited_to_ = keyspace;
  changed_.NotifyAll();
}

void FaultTier::BlockTouches(bool on) {
  MutexLock lock(&mutex_);
  touches_block_ = on;
  changed_.NotifyAll();
}

void FaultTier::Touch(const KeyspaceId& keyspace, std::span<const PageKey> keys) {
  {
    MutexLock lock(&mutex_);
    while (touches_block_) changed_.Wait(&mutex_);
    touched_[keyspace] += keys.size();
  }
  inner_->Touch(keyspace, keys);
}

FaultTier::Fault FaultTier::FaultOf(const KeyspaceId& keyspace) const {
  return !limited_to_ || *limited_to_ == keyspace ? fault_ : Fault::kNone;
}

FaultTier::Fault FaultTier::WaitWhile(Fault blocking, const KeyspaceId& keyspace) const {
  MutexLock lock(&mutex_);
  while (FaultOf(keyspace) == blocking) changed_.Wait(&mutex_);
  return FaultOf(keyspace);
}

std::vector<absl::Status> FaultTier::Put(std::span<const FragmentWrite> fragments) {
  ++puts_;
  for (const FragmentWrite& fragment : fragments) {
    if (WaitWhile(Fault::kPutBlocks, fragment.meta.keyspace) != Fault::kPutFails) continue;
    return std::vector<absl::Status>(fragments.size(), absl::UnavailableError("fault"));
  }
  std::vector<absl::Status> statuses = inner_->Put(fragments);
  if (std::all_of(statuses.begin(), statuses.end(), [](const auto& s) { return s.ok(); })) {
    after_put_.Call();
  }
  return statuses;
}

absl::Status FaultTier::Writable() const {
  {
    MutexLock lock(&mutex_);
    if (fault_ == Fault::kPutFails) return absl::UnavailableError("fault");
  }
  return inner_->Writable();
}

absl::Status FaultTier::Get(const FragmentMeta& fragment, std::span<std::byte> room) {
  ++gets_;
  const Fault now = WaitWhile(Fault::kGetBlocks, fragment.keyspace);
  if (now == Fault::kGetFails) return absl::UnavailableError("fault");
  CRUMB_RETURN_IF_ERROR(inner_->Get(fragment, room));
  if (now == Fault::kGetFlips) room[fragment.bytes / 2] ^= std::byte{4};
  if (now == Fault::kGetShort) room = room.first(fragment.bytes - 1);
  absl::Status status = VerifyFragment(fragment, room);
  if (absl::IsDataLoss(status))
    inner_->Remove(fragment.keyspace, std::span(&fragment.key, 1)).IgnoreError();
  if (status.ok()) after_get_.Call();
  return status;
}

}  // namespace crumb::storage
