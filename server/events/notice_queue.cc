// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/events/notice_queue.h"

#include <utility>

namespace crumb::server {
namespace {

// Keeps a message far below gRPC's bound.
constexpr size_t kKeysPerNotice = 4096;

}  // namespace

uint64_t NoticeQueue::AddDurable(const KeyspaceId& keyspace, const PageKey& key, uint64_t times) {
  uint64_t added = 0;
  {
    MutexLock lock(&mutex_);
    for (; added < times && size_ < notices_max_; ++added) {
      ++size_;
      Durable* last = notices_.empty() ? nullptr : std::get_if<Durable>(&notices_.back());
      if (last == nullptr || last->keyspace != keyspace || last->keys.size() >= kKeysPerNotice) {
        last = &std::get<Durable>(notices_.emplace_back(Durable{keyspace, {}}));
      }
      last->keys.push_back(key);
    }
  }
  if (added > 0) wake_();
  return added;
}

bool NoticeQueue::AddStateChange(StateChange change) { return Add(std::move(change)); }

bool NoticeQueue::AddSlabGone(uint32_t slab) { return Add(SlabGone{slab}); }

bool NoticeQueue::Add(Notice notice) {
  {
    MutexLock lock(&mutex_);
    if (size_ >= notices_max_) return false;
    ++size_;
    notices_.push_back(std::move(notice));
  }
  wake_();
  return true;
}

bool NoticeQueue::AddDemotions(Demotions demotions) {
  {
    MutexLock lock(&mutex_);
    if (size_ + demotions.work.size() > notices_max_) return false;
    size_ += demotions.work.size();
    notices_.emplace_back(std::move(demotions));
  }
  wake_();
  return true;
}

std::optional<NoticeQueue::Notice> NoticeQueue::Take() {
  MutexLock lock(&mutex_);
  if (notices_.empty()) return std::nullopt;
  Notice notice = std::move(notices_.front());
  notices_.pop_front();
  if (const auto* durable = std::get_if<Durable>(&notice)) {
    size_ -= durable->keys.size();
  } else if (const auto* demotions = std::get_if<Demotions>(&notice)) {
    size_ -= demotions->work.size();
  } else {
    --size_;
  }
  return notice;
}

}  // namespace crumb::server
