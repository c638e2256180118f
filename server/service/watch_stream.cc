// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/service/streams.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/base/wire_enums.h"
#include "server/calls/lease_calls.h"
#include "server/service/queue_stream.h"

namespace crumb::server {
namespace {

// Pages of a snapshot that room is taken for at once.
constexpr uint64_t kSnapshotRoom = 64;

using Base = StallableQueueStream<grpc::ServerWriteReactor<v1::WatchEventsResponse>,
                                  v1::WatchEventsResponse>;

class WatchStream : public Base {
 public:
  WatchStream(const CallContext& context, std::unique_ptr<CallScope> scope,
              grpc::CallbackServerContext& call)
      : Base(call, context.clock, context.metrics.stalled_streams),
        context_(context),
        scope_(std::move(scope)) {}

  void Start(const absl::Status& admitted, StreamRegistry& streams,
             const v1::WatchEventsRequest& request) {
    const absl::Status status = admitted.ok() ? Subscribe(streams, request) : admitted;
    if (!status.ok()) {
      scope_->SetCode(status.code());
      End(ToGrpc(status));
      return Begin();
    }
    if (!request.snapshot()) return Begin();
    auto self = std::static_pointer_cast<WatchStream>(shared_from_this());
    RunOnControl(
        context_, [self] { return self->ReadSnapshot(); },
        [self](const absl::Status& read) {
          if (!read.ok()) self->End(ToGrpc(read));
          self->Begin();
        });
  }

 protected:
  bool Take(v1::WatchEventsResponse& message) override {
    message.Clear();
    if (!snapshot_.empty()) {
      message.set_sequence(sequence_);
      message.set_kind(v1::WatchEventsResponse::KIND_ADDED);
      message.set_key(std::string(snapshot_.front().first.view()));
      message.set_tier(ToProto(snapshot_.front().second));
      snapshot_.pop_front();
      return true;
    }
    if (std::exchange(snapshot_end_due_, false)) {
      DropSnapshot();
      message.set_sequence(sequence_);
      message.set_kind(v1::WatchEventsResponse::KIND_SNAPSHOT_END);
      return true;
    }
    const std::optional<WatchQueue::Item> item = queue_ == nullptr ? std::nullopt : queue_->Take();
    if (!item.has_value()) return false;
    message.set_sequence(item->sequence);
    if (item->lost) {
      message.set_kind(v1::WatchEventsResponse::KIND_LOST);
      return true;
    }
    message.set_kind(item->event.kind == storage::PageEvent::Kind::kAdded
                         ? v1::WatchEventsResponse::KIND_ADDED
                         : v1::WatchEventsResponse::KIND_REMOVED);
    message.set_key(std::string(item->event.key.view()));
    message.set_tier(ToProto(item->event.tier));
    return true;
  }

  void Ended() override {
    queue_.reset();
    DropSnapshot();
  }

 private:
  absl::Status Subscribe(StreamRegistry& streams, const v1::WatchEventsRequest& request) {
    CRUMB_ASSIGN_OR_RETURN(const auto keyspace, FindKeyspace(context_, request.keyspace()));
    if (!streams.Add(shared_from_this())) return absl::UnavailableError("crumbd is stopping");
    keyspace_ = keyspace->id;
    queue_ = std::make_shared<WatchQueue>(static_cast<size_t>(context_.limits.watch_queue),
                                          [weak = weak_from_this()] {
                                            if (const auto self = weak.lock()) self->Wake();
                                          });
    return context_.events.Watch(context_.caller.name(), keyspace_, queue_, sequence_);
  }

  absl::Status ReadSnapshot() {
    const auto most = static_cast<uint64_t>(context_.limits.watch_snapshot_pages_max);
    absl::Status read;
    context_.store.ForEachPage(keyspace_, [&](const PageKey& key, Tier tier) {
      if (!read.ok()) return;
      if (snapshot_.size() == snapshot_room_) read = TakeSnapshotRoom(most);
      if (read.ok()) snapshot_.emplace_back(key, tier);
    });
    snapshot_end_due_ = true;
    if (!read.ok()) DropSnapshot();
    return read;
  }

  // Takes room for the next pages of the snapshot, before any of it is sent.
  absl::Status TakeSnapshotRoom(uint64_t most) {
    if (snapshot_room_ == most) {
      return absl::ResourceExhaustedError(
          fmt::format("more pages than limits.watch_snapshot_pages_max, {}", most));
    }
    const uint64_t more = std::min(kSnapshotRoom, most - snapshot_room_);
    const TenantBudget::Taken taken =
        context_.events.snapshot_pages().Take(context_.caller.name(), more);
    if (taken != TenantBudget::Taken::kYes) {
      context_.metrics.Reject(Rejection::kWatchers, taken);
      return TenantBudget::Error(taken, "limits.watch_snapshot_total_pages_max");
    }
    snapshot_room_ += more;
    return absl::OkStatus();
  }

  void DropSnapshot() {
    snapshot_ = {};
    context_.events.snapshot_pages().Give(context_.caller.name(), std::exchange(snapshot_room_, 0));
  }

  const CallContext context_;
  const std::unique_ptr<CallScope> scope_;
  KeyspaceId keyspace_;
  uint64_t sequence_ = 0;  // number of the last event before the snapshot
  std::shared_ptr<WatchQueue> queue_;
  std::deque<std::pair<PageKey, Tier>> snapshot_;
  uint64_t snapshot_room_ = 0;  // pages of EventHub::snapshot_pages()
  bool snapshot_end_due_ = false;
};

}  // namespace

grpc::ServerWriteReactor<v1::WatchEventsResponse>* StartWatch(
    const CallContext& context, const absl::Status& admitted, StreamRegistry& streams,
    StallWatch& stalls, std::unique_ptr<CallScope> scope, grpc::CallbackServerContext& call,
    const v1::WatchEventsRequest& request) {
  const auto stream = std::make_shared<WatchStream>(context, std::move(scope), call);
  stalls.Add(stream);
  stream->Start(admitted, streams, request);
  return stream.get();
}

}  // namespace crumb::server
