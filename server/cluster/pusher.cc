// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/pusher.h"

#include <algorithm>
#include <utility>

#include "common/logging.h"

namespace crumb::server {
namespace {

// Longest pause before an offer is made again.
constexpr auto kRetryMax = std::chrono::seconds(30);
// How far an offer looks for pages of its range: as many ranges as a wide engine has.
constexpr size_t kBatchesLookedAt = 16;

PushDrop DropOf(v1::MissReason reason) {
  switch (reason) {
    case v1::MISS_REASON_DEADLINE:
      return PushDrop::kLate;
    case v1::MISS_REASON_CORRUPT:
      return PushDrop::kCorrupt;
    case v1::MISS_REASON_GENERATION:
      return PushDrop::kGeneration;
    case v1::MISS_REASON_ABSENT:
    case v1::MISS_REASON_NOT_COVERED:
    case v1::MISS_REASON_QUALITY:
      return PushDrop::kAbsent;
    default:
      return PushDrop::kBusy;
  }
}

PushDrop DropOf(const absl::Status& status) {
  if (!IsResponse(status)) return PushDrop::kSilent;
  // kAborted: it knows this node or the keyspace only in a moment.
  const bool later = absl::IsResourceExhausted(status) || absl::IsAborted(status);
  return later ? PushDrop::kBusy : PushDrop::kRefused;
}

// Returns whether another attempt would end in the same way.
bool IsFinal(PushDrop reason) {
  return reason == PushDrop::kRefused || reason == PushDrop::kGeneration;
}

}  // namespace

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

void Pusher::Drop(PushDrop reason, size_t pages) {
  metrics_.push_dropped[static_cast<size_t>(reason)].Add(pages);
}

bool Pusher::Queue(Fresh fresh, size_t pages_max) {
  fresh.header.tile_sums.clear();
  MutexLock lock(&mutex_);
  if (stopping_ || Waiting() >= pages_max) {
    Drop(stopping_ ? PushDrop::kStopped : PushDrop::kQueueFull, 1);
    return false;
  }
  queue_.push_back(std::move(fresh));
  changed_.NotifyAll();
  return true;
}

bool Pusher::Offer(const FragmentHeader& header) {
  return Queue({header, PageKey(), false}, options_.queue_pages);
}

bool Pusher::OfferCopy(const FragmentHeader& header, const PageKey& run) {
  return Queue({header, run, true}, options_.queue_pages / 2);
}

bool Pusher::OfferAgain(const std::string& home, const FragmentHeader& header, const PageKey& run) {
  Retry offer;
  offer.node = home;
  offer.item = {header.keyspace, header.key, run, header.range, header.tile_bytes, true, 0};
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  if (stopping_ || Waiting() >= options_.queue_pages / 2) {
    Drop(stopping_ ? PushDrop::kStopped : PushDrop::kQueueFull, 1);
    return false;
  }
  retries_.emplace(now, std::move(offer));
  ++waiting_;
  changed_.NotifyAll();
  return true;
}

void Pusher::ViewChanged() {
  const TimePoint now = clock_.Now();
  MutexLock lock(&mutex_);
  while (!held_.empty()) {
    retries_.emplace(now, Retry{"", std::move(held_.front())});
    held_.pop_front();
    ++waiting_;
  }
  changed_.NotifyAll();
}

bool Pusher::WaitUntilBelow(size_t pages_max, TimePoint deadline) {
  MutexLock lock(&mutex_);
  while (!stopping_ && Waiting() >= pages_max) {
    if (!changed_.WaitUntil(&mutex_, deadline)) break;
  }
  return !stopping_ && Waiting() < pages_max;
}

void Pusher::WaitForRoom(TimePoint deadline) { WaitUntilBelow(options_.queue_pages, deadline); }

bool Pusher::WaitForRoomForCopies(TimePoint deadline) {
  return WaitUntilBelow(options_.queue_pages / 2, deadline);
}

size_t Pusher::pending() const {
  MutexLock lock(&mutex_);
  return Waiting() + under_way_;
}

void Pusher::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
  }
  thread_.Join();
  MutexLock lock(&mutex_);
  while (offers_ > 0) changed_.Wait(&mutex_);  // their deadlines end
  const size_t left = Waiting() + held_.size();
  if (left > 0) LogInfo("stopping: {} pages were not offered to their homes", left);
  Drop(PushDrop::kStopped, left);
  queue_.clear();
  outgoing_.clear();
  retries_.clear();
  held_.clear();
  routing_ = 0;
  waiting_ = 0;
}

void Pusher::Run() {
  Work work;
  while (TakeWork(&work)) {
    for (const Fresh& fresh : work.fresh) Route(fresh);
    for (const Retry& retry : work.again) RouteAgain(retry);
    {
      MutexLock lock(&mutex_);
      for (const auto& [node, outgoing] : outgoing_) {
        if (!outgoing.items.empty()) work.nodes.insert(node);
      }
    }
    for (const std::string& node : work.nodes) Pump(node);
  }
}

// Waits for something to do; false: stopping.
bool Pusher::TakeWork(Work* work) {
  *work = Work();
  MutexLock lock(&mutex_);
  while (!stopping_ && queue_.empty() && ready_.empty()) {
    if (retries_.empty()) {
      changed_.Wait(&mutex_);
    } else if (clock_.Now() < retries_.begin()->first) {
      changed_.WaitUntil(&mutex_, retries_.begin()->first);
    } else {
      break;
    }
  }
  if (stopping_) return false;
  work->fresh.swap(queue_);
  work->nodes.swap(ready_);
  const auto due = retries_.upper_bound(clock_.Now());
  for (auto retry = retries_.begin(); retry != due; ++retry) {
    work->again.push_back(std::move(retry->second));
  }
  retries_.erase(retries_.begin(), due);
  waiting_ -= work->again.size();
  routing_ = work->fresh.size() + work->again.size();
  return true;
}

void Pusher::Route(const Fresh& fresh) {
  const FragmentHeader& header = fresh.header;
  const std::optional<PageKey> run = fresh.run == PageKey() ? runs_.Find(header) : fresh.run;
  if (!run) Drop(PushDrop::kUnplaced, 1);
  const bool alone = run && peers_.history().views().current->nodes.size() < 2;
  const std::vector<std::string> homes =
      run ? peers_.HomesToPush(*run) : std::vector<std::string>();
  MutexLock lock(&mutex_);
  --routing_;
  changed_.NotifyAll();
  if (!run) return;
  const Item item = {header.keyspace,   header.key,      *run, header.range,
                     header.tile_bytes, fresh.note_only, 0};
  if (homes.empty() && alone && !fresh.note_only) Hold(item);
  for (const std::string& home : homes) Append(home, item);
}

// To the same home, or, when it is none any more, to all that are.
void Pusher::RouteAgain(const Retry& retry) {
  const bool alone = peers_.history().views().current->nodes.size() < 2;
  std::vector<std::string> homes = peers_.HomesToPush(retry.item.run);
  if (std::find(homes.begin(), homes.end(), retry.node) != homes.end()) homes = {retry.node};
  MutexLock lock(&mutex_);
  --routing_;
  changed_.NotifyAll();
  if (homes.empty() && alone && !retry.item.note_only) Hold(retry.item);
  for (const std::string& home : homes) Append(home, retry.item);
}

void Pusher::Append(const std::string& node, const Item& item) {
  outgoing_[node].items.push_back(item);
  ++waiting_;
}

// The oldest goes when there are too many.
void Pusher::Hold(Item item) {
  item.attempts = 0;
  held_.push_back(std::move(item));
  if (held_.size() <= options_.queue_pages) return;
  held_.pop_front();
  Drop(PushDrop::kAlone, 1);
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
      ++outgoing.under_way;
      ++offers_;
      under_way_ += batch.size();
      changed_.NotifyAll();
    }
    PushDrop reason = PushDrop::kNodeGone;
    if (peer != nullptr) {
      const auto session = sessions_.Grant(node, batch.front().keyspace);
      reason = session.ok() ? PushDrop::kBreaker : PushDrop::kBusy;
      if (session.ok() && peer->breaker().Allow()) {
        Send(peer, std::move(batch), *session);
        continue;
      }
    }
    for (const Item& item : batch) Fail(node, item, reason);
    MutexLock lock(&mutex_);
    under_way_ -= batch.size();
    --outgoing_[node].under_way;
    --offers_;
    changed_.NotifyAll();
  }
}

// The first item and those behind it that one offer can name with it: ranks commit pages of their
// ranges in turn.
std::vector<Pusher::Item> Pusher::TakeBatch(Outgoing& outgoing) {
  std::vector<Item> batch, others;
  size_t looked_at = kBatchesLookedAt * options_.batch_pages;
  for (; !outgoing.items.empty() && batch.size() < options_.batch_pages && looked_at > 0;
       --looked_at) {
    Item& next = outgoing.items.front();
    const bool fits = batch.empty() || (next.keyspace == batch.front().keyspace &&
                                        next.range == batch.front().range &&
                                        next.note_only == batch.front().note_only);
    (fits ? batch : others).push_back(std::move(next));
    outgoing.items.pop_front();
  }
  outgoing.items.insert(outgoing.items.begin(), others.begin(), others.end());
  waiting_ -= batch.size();
  return batch;
}

v1::PeerPushRequest Pusher::RequestOf(const std::vector<Item>& batch,
                                      const transport::SessionToken& session) const {
  v1::PeerPushRequest request;
  const KeyspaceId& keyspace = batch.front().keyspace;
  request.mutable_keyspace()->set_keyspace(std::string(keyspace.view()));
  *request.mutable_keyspace()->mutable_record() = keyspaces_.HeadOf(keyspace);
  const TileRange& range = batch.front().range;
  request.mutable_range()->set_layer_begin(range.layers.begin);
  request.mutable_range()->set_layer_end(range.layers.end);
  request.mutable_range()->set_head_begin(range.heads.begin);
  request.mutable_range()->set_head_end(range.heads.end);
  for (const Item& item : batch) {
    request.mutable_keys()->append(item.key.view());
    request.add_tile_bytes(item.tile_bytes);
  }
  request.set_session(std::string(session.begin(), session.end()));
  request.set_leaving(leaving_);
  request.set_note_only(batch.front().note_only);
  return request;
}

void Pusher::Send(const std::shared_ptr<Peer>& peer, std::vector<Item> batch,
                  const transport::SessionToken& session) {
  metrics_.push_offered_pages.Add(batch.size());
  v1::PeerPushRequest request = RequestOf(batch, session);
  peer->Push(
      std::move(request), clock_.Now() + options_.deadline,
      [this, peer, batch = std::move(batch)](const absl::StatusOr<v1::PeerPushResponse>& response) {
        TakeResponse(*peer, batch, response);
      });
}

// On a thread of the peer's, inside Push when crumbd is stopping.
void Pusher::TakeResponse(Peer& peer, const std::vector<Item>& batch,
                          const absl::StatusOr<v1::PeerPushResponse>& response) {
  peer.breaker().Note(response.status());
  if (response.ok()) {
    NoteTaken(peer.id(), batch, *response);
  } else {
    LogDebug("offering {} pages to node {}: {}", batch.size(), peer.id(),
             response.status().ToString());
    for (const Item& item : batch) Fail(peer.id(), item, DropOf(response.status()));
  }
  MutexLock lock(&mutex_);
  under_way_ -= batch.size();
  const auto found = outgoing_.find(peer.id());
  if (found != outgoing_.end()) --found->second.under_way;
  ready_.insert(peer.id());
  --offers_;
  changed_.NotifyAll();
}

void Pusher::NoteTaken(const std::string& node, const std::vector<Item>& batch,
                       const v1::PeerPushResponse& response) {
  const auto& pages = response.failed_pages();
  const bool named =
      static_cast<uint32_t>(pages.size()) == response.failed() &&
      response.failed_reasons_size() == pages.size() &&
      std::all_of(pages.begin(), pages.end(), [&](uint32_t page) { return page < batch.size(); });
  if (!named) {
    // The node does not say which ones; it will have the others the next time.
    for (const Item& item : batch) Fail(node, item, PushDrop::kBusy);
    return;
  }
  metrics_.push_stored_pages.Add(response.stored());
  metrics_.push_known_pages.Add(response.deduplicated());
  metrics_.push_noted_pages.Add(response.noted());
  for (int i = 0; i < pages.size(); ++i) {
    Fail(node, batch[pages[i]], DropOf(response.failed_reasons(i)));
  }
}

void Pusher::Fail(const std::string& node, const Item& item, PushDrop reason) {
  Retry retry = {node, item};
  if (++retry.item.attempts >= options_.attempts || IsFinal(reason)) return Drop(reason, 1);
  // 2^20 pauses of a millisecond are above any bound.
  const auto doublings = std::min<int64_t>(item.attempts, 20);
  const Duration pause = std::min<Duration>(options_.retry_min * (int64_t{1} << doublings),
                                            std::max<Duration>(kRetryMax, options_.retry_min));
  const TimePoint due = clock_.Now() + pause;
  metrics_.push_retried_pages.Add();
  MutexLock lock(&mutex_);
  retries_.emplace(due, std::move(retry));
  ++waiting_;
}

}  // namespace crumb::server
