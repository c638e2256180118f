// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/pusher.h"

#include <utility>

#include "common/logging.h"

namespace crumb::server {

Pusher::Pusher(const Options& options, PeerTable& peers, RunFinder& runs, PeerSessions& sessions,
               const KeyspaceRegistry& keyspaces, const Clock& clock, ClusterMetrics& metrics)
    : options_(options),
      peers_(peers),
      runs_(runs),
      sessions_(sessions),
      keyspaces_(keyspaces),
      clock_(clock),
      metrics_(metrics),
      thread_("crumb-push", [this] { Run(); }) {}

Pusher::~Pusher() { Stop(); }

bool Pusher::Offer(const FragmentHeader& header) {
  FragmentHeader slim = header;
  slim.tile_sums.clear();
  MutexLock lock(&mutex_);
  if (stopping_ || queue_.size() + routing_ + waiting_ >= options_.queue_pages) {
    metrics_.push_dropped_pages.Add();
    return false;
  }
  queue_.push_back(std::move(slim));
  changed_.NotifyAll();
  return true;
}

void Pusher::WaitForRoom(TimePoint deadline) {
  MutexLock lock(&mutex_);
  while (!stopping_ && queue_.size() + routing_ + waiting_ >= options_.queue_pages) {
    if (!changed_.WaitUntil(&mutex_, deadline)) return;
  }
}

size_t Pusher::pending() const {
  MutexLock lock(&mutex_);
  return queue_.size() + routing_ + waiting_ + under_way_;
}

void Pusher::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    queue_.clear();
    outgoing_.clear();
    waiting_ = 0;
    changed_.NotifyAll();
  }
  thread_.Join();
  MutexLock lock(&mutex_);
  while (offers_ > 0) changed_.Wait(&mutex_);  // their deadlines end
}

void Pusher::Run() {
  while (true) {
    std::deque<FragmentHeader> batch;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (stopping_) return;
      batch.swap(queue_);
      routing_ = batch.size();
    }
    for (const FragmentHeader& header : batch) Route(header);
    std::vector<std::string> nodes;
    {
      MutexLock lock(&mutex_);
      routing_ = 0;
      for (const auto& [node, outgoing] : outgoing_) nodes.push_back(node);
      changed_.NotifyAll();
    }
    for (const std::string& node : nodes) Pump(node);
  }
}

void Pusher::Route(const FragmentHeader& header) {
  const std::optional<PageKey> run = runs_.Find(header);
  if (!run) return metrics_.push_unplaced_pages.Add();
  for (const auto& home : peers_.HomesToPush(*run)) {
    MutexLock lock(&mutex_);
    if (stopping_) return;
    outgoing_[home->id()].items.push_back(
        {header.keyspace, header.key, header.range, header.tile_bytes});
    ++waiting_;
  }
}

void Pusher::Pump(const std::string& node) {
  const std::shared_ptr<Peer> peer = peers_.Find(node);
  while (true) {
    std::vector<Item> batch;
    {
      MutexLock lock(&mutex_);
      const auto found = outgoing_.find(node);
      if (found == outgoing_.end() || stopping_) return;
      Outgoing& outgoing = found->second;
      if (outgoing.under_way >= options_.pushes_max) return;
      if (outgoing.items.empty()) {
        if (outgoing.under_way == 0) outgoing_.erase(found);
        return;
      }
      batch = TakeBatch(outgoing);
      if (peer != nullptr) {
        ++outgoing.under_way;
        ++offers_;
        under_way_ += batch.size();
      }
      changed_.NotifyAll();
    }
    if (peer == nullptr) {
      metrics_.push_failed_pages.Add(batch.size());
    } else {
      Send(peer, batch);
    }
  }
}

// Leading items that one offer can name.
std::vector<Pusher::Item> Pusher::TakeBatch(Outgoing& outgoing) {
  std::vector<Item> batch;
  while (!outgoing.items.empty() && batch.size() < options_.batch_pages) {
    const Item& next = outgoing.items.front();
    if (!batch.empty() &&
        (next.keyspace != batch.front().keyspace || next.range != batch.front().range)) {
      break;
    }
    batch.push_back(next);
    outgoing.items.pop_front();
    --waiting_;
  }
  return batch;
}

void Pusher::Send(const std::shared_ptr<Peer>& peer, const std::vector<Item>& batch) {
  const size_t pages = batch.size();
  const std::string node = peer->id();
  const KeyspaceId& keyspace = batch.front().keyspace;
  const auto session = sessions_.Grant(node, keyspace);
  if (!session.ok() || !peer->breaker().Allow()) {
    metrics_.push_failed_pages.Add(pages);
    return Ended(node, pages);
  }
  metrics_.push_offered_pages.Add(pages);
  v1::PeerPushRequest request;
  request.mutable_keyspace()->set_keyspace(std::string(keyspace.view()));
  *request.mutable_keyspace()->mutable_record() = keyspaces_.RecordOf(keyspace);
  const TileRange& range = batch.front().range;
  request.mutable_range()->set_layer_begin(range.layers.begin);
  request.mutable_range()->set_layer_end(range.layers.end);
  request.mutable_range()->set_head_begin(range.heads.begin);
  request.mutable_range()->set_head_end(range.heads.end);
  for (const Item& item : batch) {
    request.mutable_keys()->append(item.key.view());
    request.add_tile_bytes(item.tile_bytes);
  }
  request.set_session(std::string(session->begin(), session->end()));
  peer->Push(std::move(request), clock_.Now() + options_.deadline,
             [this, peer, node, pages](absl::StatusOr<v1::PeerPushResponse> answer) {
               if (answer.ok()) {
                 peer->breaker().Succeed();
                 metrics_.push_stored_pages.Add(answer->stored());
                 metrics_.push_known_pages.Add(answer->deduplicated());
                 metrics_.push_failed_pages.Add(answer->failed());
               } else {
                 LogDebug("offering {} pages to node {}: {}", pages, node,
                          answer.status().ToString());
                 // A node that is at a bound answers; one that is silent does not.
                 if (absl::IsResourceExhausted(answer.status())) {
                   peer->breaker().Succeed();
                 } else {
                   peer->breaker().Fail();
                 }
                 metrics_.push_failed_pages.Add(pages);
               }
               Ended(node, pages);
             });
}

void Pusher::Ended(const std::string& node, size_t pages) {
  {
    MutexLock lock(&mutex_);
    under_way_ -= pages;
    const auto found = outgoing_.find(node);
    if (found != outgoing_.end() && found->second.under_way > 0) --found->second.under_way;
  }
  Pump(node);
  MutexLock lock(&mutex_);
  --offers_;
  changed_.NotifyAll();
}

}  // namespace crumb::server
