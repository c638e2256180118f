// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/events/notice_queue.h"

#include <algorithm>
#include <utility>

#include "common/fragment_header.h"

namespace crumb::server {
namespace {

// Keeps a message far below gRPC's bound.
constexpr size_t kKeysPerNotice = 4096;
// Memory of a notice without the memory that it points to: the entry of the queue, that of the
// table of state changes, and the allocator's overhead of a vector or a string.
constexpr uint64_t kNoticeBytes = sizeof(NoticeQueue::Notice) + 64;

uint64_t BytesOf(const NoticeQueue::Notice& notice) {
  uint64_t bytes = kNoticeBytes;
  if (const auto* durable = std::get_if<NoticeQueue::Durable>(&notice)) {
    bytes += durable->keys.size() * sizeof(PageKey);
  } else if (const auto* change = std::get_if<NoticeQueue::StateChange>(&notice)) {
    bytes += change->reason.size();
  } else if (const auto* demotions = std::get_if<NoticeQueue::Demotions>(&notice)) {
    for (const storage::DemotionWork& one : demotions->work) {
      bytes += sizeof(one) + sizeof(FragmentHeader);
      if (one.header != nullptr) bytes += one.header->tile_sums.size() * sizeof(uint32_t);
    }
  }
  return bytes;
}

}  // namespace

NoticeQueue::~NoticeQueue() {
  MutexLock lock(&mutex_);
  for (const Notice& notice : notices_) GiveBytes(BytesOf(notice));
}

uint64_t NoticeQueue::AddDurable(const KeyspaceId& keyspace, const PageKey& key, uint64_t times) {
  uint64_t added = 0;
  {
    MutexLock lock(&mutex_);
    times = std::min<uint64_t>(times, notices_max_ - size_);
    while (added < times) {
      Durable* last = notices_.empty() ? nullptr : std::get_if<Durable>(&notices_.back());
      const bool opens =
          last == nullptr || last->keyspace != keyspace || last->keys.size() >= kKeysPerNotice;
      const size_t room = kKeysPerNotice - (opens ? 0 : last->keys.size());
      const size_t keys = std::min<size_t>(times - added, room);
      if (!TakeBytes((opens ? kNoticeBytes : 0) + keys * sizeof(PageKey))) break;
      if (opens) last = &std::get<Durable>(notices_.emplace_back(Durable{keyspace, {}}));
      last->keys.insert(last->keys.end(), keys, key);
      size_ += keys;
      added += keys;
    }
  }
  if (added > 0) wake_();
  return added;
}

bool NoticeQueue::AddStateChange(StateChange change) {
  {
    MutexLock lock(&mutex_);
    if (const auto queued = changes_.find(change.keyspace); queued != changes_.end()) {
      ReplaceLocked(*queued->second, change);
      return true;  // the change that waited has woken the reader
    }
    const KeyspaceId keyspace = change.keyspace;
    if (!AddLocked(std::move(change), 1)) return false;
    changes_[keyspace] = &std::get<StateChange>(notices_.back());
  }
  wake_();
  return true;
}

void NoticeQueue::ReplaceLocked(StateChange& queued, StateChange& change) {
  GiveBytes(queued.reason.size());
  // The state counts, and is not lost for want of room for its reason.
  if (!TakeBytes(change.reason.size())) change.reason.clear();
  change.generation = std::max(change.generation, queued.generation);
  queued = std::move(change);
}

bool NoticeQueue::AddSlabGone(uint32_t slab) {
  {
    MutexLock lock(&mutex_);
    if (!AddLocked(SlabGone{slab}, 1)) return false;
  }
  wake_();
  return true;
}

bool NoticeQueue::AddDemotions(Demotions demotions) {
  {
    MutexLock lock(&mutex_);
    const size_t size = demotions.work.size();
    if (!AddLocked(std::move(demotions), size)) return false;
  }
  wake_();
  return true;
}

bool NoticeQueue::AddLocked(Notice notice, size_t size) {
  if (size_ + size > notices_max_ || !TakeBytes(BytesOf(notice))) return false;
  size_ += size;
  notices_.push_back(std::move(notice));
  return true;
}

std::optional<NoticeQueue::Notice> NoticeQueue::Take() {
  MutexLock lock(&mutex_);
  if (notices_.empty()) return std::nullopt;
  Notice notice = std::move(notices_.front());
  notices_.pop_front();
  GiveBytes(BytesOf(notice));
  if (const auto* durable = std::get_if<Durable>(&notice)) {
    size_ -= durable->keys.size();
  } else if (const auto* demotions = std::get_if<Demotions>(&notice)) {
    size_ -= demotions->work.size();
  } else {
    --size_;
  }
  if (const auto* change = std::get_if<StateChange>(&notice)) changes_.erase(change->keyspace);
  return notice;
}

bool NoticeQueue::TakeBytes(uint64_t bytes) {
  return bytes_ == nullptr || bytes_->Take(tenant_, bytes) == TenantBudget::Taken::kYes;
}

void NoticeQueue::GiveBytes(uint64_t bytes) {
  if (bytes_ != nullptr) bytes_->Give(tenant_, bytes);
}

}  // namespace crumb::server
