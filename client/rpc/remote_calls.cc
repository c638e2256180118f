// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/remote_calls.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "client/rpc/call_socket.h"
#include "client/rpc/fragment_reader.h"
#include "client/rpc/wire.h"
#include "common/status_macros.h"

namespace crumb::client {
namespace {

// Returns a lease to crumbd when the last reference goes.
class LeaseHold {
 public:
  LeaseHold(std::shared_ptr<ConnectionKeeper> keeper, std::shared_ptr<Connection> connection,
            uint64_t lease)
      : keeper_(std::move(keeper)), connection_(std::move(connection)), lease_(lease) {}
  LeaseHold(const LeaseHold&) = delete;
  LeaseHold& operator=(const LeaseHold&) = delete;
  ~LeaseHold() { keeper_->ReleaseLater(std::move(connection_), lease_); }

 private:
  const std::shared_ptr<ConnectionKeeper> keeper_;
  std::shared_ptr<Connection> connection_;
  const uint64_t lease_;
};

// An Acquire over one connection.
class PendingLease final : public PendingAcquire {
 public:
  // Sends the request.
  PendingLease(const AcquireRequest& request, v1::AcquireRequest wire,
               std::shared_ptr<ConnectionKeeper> keeper, std::shared_ptr<Connection> connection,
               uint32_t verify_offset)
      : request_(request),
        keeper_(std::move(keeper)),
        connection_(std::move(connection)),
        verify_offset_(verify_offset),
        wire_(std::move(wire)),
        number_(wire_.request()),
        deadline_(Clock::Real().Now() + request_.timeout) {
    // Checksums of all tiles take megabytes, too many for the call socket.
    const bool small = (wire_.peers().empty() || wire_.has_peer_sums()) && !wire_.device_sums();
    if (small && connection_->calls() != nullptr) {
      call_ = connection_->calls()->Start(wire_, deadline_, &answer_, &flags_);
    }
    if (call_ == nullptr) call_ = StartOverGrpc(&answer_);
  }
  ~PendingLease() override {
    if (call_ == nullptr) return;
    call_.reset();
    keeper_->ForgetLater(connection_, number_);
  }

  bool Ready() override { return call_ == nullptr || call_->Ready(); }
  absl::StatusOr<AcquireResult> Finish() override;

 private:
  std::unique_ptr<PendingCall> StartOverGrpc(v1::AcquireResponse* answer) const {
    return connection_->stub().Start({connection_->token(), deadline_}, wire_, answer);
  }
  absl::Status BringFragments(std::shared_ptr<void>* hold);

  const AcquireRequest request_;
  const std::shared_ptr<ConnectionKeeper> keeper_;
  const std::shared_ptr<Connection> connection_;
  const uint32_t verify_offset_;
  v1::AcquireRequest wire_;
  const uint64_t number_;
  const TimePoint deadline_;
  CallSocket::ResponseFlags flags_;
  v1::AcquireResponse answer_;
  std::unique_ptr<PendingCall> call_;  // null once finished
};

// Fetches the fragments of a lease whose first response had none. This grants the lease a second
// time; `hold` comes to hold both.
absl::Status PendingLease::BringFragments(std::shared_ptr<void>* hold) {
  wire_.set_lease(answer_.lease());
  v1::AcquireResponse joined;
  CRUMB_RETURN_IF_ERROR(StartOverGrpc(&joined)->Finish());
  if (joined.lease() == 0) return absl::UnavailableError("crumbd does not know its lease any more");
  using Holds = std::pair<std::shared_ptr<void>, std::shared_ptr<void>>;
  *hold = std::make_shared<Holds>(
      *hold, std::make_shared<LeaseHold>(keeper_, connection_, joined.lease()));
  answer_.mutable_fragments()->Swap(joined.mutable_fragments());
  answer_.mutable_device_fragments()->Swap(joined.mutable_device_fragments());
  return absl::OkStatus();
}

absl::StatusOr<AcquireResult> PendingLease::Finish() {
  absl::Status status = std::exchange(call_, nullptr)->Finish();
  std::shared_ptr<void> hold;
  if (status.ok() && answer_.lease() != 0) {
    hold = std::make_shared<LeaseHold>(keeper_, connection_, answer_.lease());
  }
  if (status.ok() && flags_.fragments_apart) status = BringFragments(&hold);
  if (absl::IsDeadlineExceeded(status)) keeper_->Count({.deadline_exceeded = 1});
  if (!status.ok()) {
    // crumbd may have granted a lease, or grant it later.
    keeper_->ForgetLater(connection_, number_);
    return status;
  }
  const uint32_t every = request_.verify_every;
  ReadFragments read = ReadAcquireResponse(*connection_, request_, answer_, [&](int page) {
    return every > 0 && (static_cast<uint32_t>(page) + verify_offset_) % every == 0;
  });
  AcquireResult result;
  result.hit_pages = read.hit_pages;
  result.miss_reason = static_cast<MissReason>(answer_.miss_reason());
  if (read.miss_reason != MissReason::kNone) {
    result.miss_reason = read.miss_reason;
    if (read.miss_reason != MissReason::kGeneration) keeper_->Count({.verify_failures = 1});
  }
  const int reported = std::min(result.hit_pages, answer_.page_tiers_size());
  result.page_tiers.reserve(static_cast<size_t>(result.hit_pages));
  for (int page = 0; page < reported; ++page) {
    result.page_tiers.push_back(static_cast<Tier>(answer_.page_tiers(page)));
  }
  result.page_tiers.resize(result.hit_pages, Tier::kUnknown);
  if (result.hit_pages > 0 && hold != nullptr) {
    result.lease = std::make_shared<const Lease>(
        std::move(read.fragments), std::move(read.device_fragments), std::move(read.device_store),
        connection_->epoch(), std::move(hold));
    result.lease_id = answer_.lease();
  } else {
    result.hit_pages = 0;
    result.page_tiers.clear();
  }
  return result;
}

// The result of a request that could not be sent.
class FailedAcquire final : public PendingAcquire {
 public:
  explicit FailedAcquire(absl::Status status) : status_(std::move(status)) {}
  absl::StatusOr<AcquireResult> Finish() override { return status_; }

 private:
  const absl::Status status_;
};

v1::AcquireRequest WireRequest(const AcquireRequest& request, uint64_t number) {
  v1::AcquireRequest wire;
  wire.set_keyspace(ToBytes(request.keyspace));
  wire.set_keys(ToBytes(request.keys));
  wire.set_first_page(request.first_page);
  if (request.first_page > 0) wire.set_run(std::string(request.run.view()));
  if (request.range.has_value()) *wire.mutable_range() = ToWire(*request.range);
  wire.set_wait_ms(request.wait_for_lower_tiers ? WaitMs(request.timeout) : 0);
  wire.set_window_tokens(request.window_tokens);
  wire.set_lease(request.lease);
  for (const PoolId& pool : request.pools) wire.add_pools(pool.ToBytes());
  for (const PoolId& pool : request.peers) wire.add_peers(pool.ToBytes());
  wire.set_device_sums(request.device_sums);
  if (request.peer_sums.has_value()) *wire.mutable_peer_sums() = ToWire(*request.peer_sums);
  wire.set_behind_miss(request.behind_miss);
  wire.set_request(number);
  return wire;
}

// Returns a staging slot to crumbd unless it was committed.
class StagingHold {
 public:
  StagingHold(std::shared_ptr<ConnectionKeeper> keeper, std::shared_ptr<Connection> connection,
              uint64_t offset, uint64_t reserve)
      : keeper_(std::move(keeper)),
        connection_(std::move(connection)),
        offset_(offset),
        reserve_(reserve) {}
  StagingHold(const StagingHold&) = delete;
  StagingHold& operator=(const StagingHold&) = delete;
  ~StagingHold() {
    if (!committed_) keeper_->AbortLater(std::move(connection_), offset_, reserve_);
  }

  const Connection* connection() const { return connection_.get(); }
  uint64_t reserve() const { return reserve_; }
  void NoteCommitted() { committed_ = true; }

 private:
  const std::shared_ptr<ConnectionKeeper> keeper_;
  std::shared_ptr<Connection> connection_;
  const uint64_t offset_;
  const uint64_t reserve_;  // number of the Reserve
  bool committed_ = false;
};

StagingHold& HoldOf(const StagingSlot& slot) {
  return *static_cast<StagingHold*>(slot.hold().get());
}

// A Commit over one connection.
class RemoteCommit final : public PendingCommit {
 public:
  RemoteCommit(std::vector<StagingSlot> slots, std::shared_ptr<Connection> connection,
               std::function<void(uint64_t)> note_mark)
      : slots_(std::move(slots)),
        connection_(std::move(connection)),
        note_mark_(std::move(note_mark)) {}
  ~RemoteCommit() override {
    if (call_ != nullptr && over_socket_) NoteCommitted();
  }

  void Send(const v1::CommitRequest& request, TimePoint deadline) {
    if (CallSocket* const calls = connection_->staging_calls(); calls != nullptr) {
      call_ = calls->Start(request, deadline, &response_);
    }
    over_socket_ = call_ != nullptr;
    if (over_socket_) return;
    call_ = connection_->stub().Start({connection_->token(), deadline}, request, &response_);
  }

  absl::StatusOr<std::vector<CommitOutcome>> Finish() override {
    const absl::Status status = std::exchange(call_, nullptr)->Finish();
    // crumbd serves what it has received over the socket and frees the room. An Abort could only
    // come before and prevent that.
    if (status.ok() || (over_socket_ && absl::IsDeadlineExceeded(status))) NoteCommitted();
    CRUMB_RETURN_IF_ERROR(status);
    note_mark_(response_.flush_mark());
    return OutcomesOf(response_.outcomes(), slots_.size());
  }

 private:
  void NoteCommitted() {
    for (const StagingSlot& slot : slots_) HoldOf(slot).NoteCommitted();
  }

  const std::vector<StagingSlot> slots_;
  const std::shared_ptr<Connection> connection_;
  const std::function<void(uint64_t)> note_mark_;
  v1::CommitResponse response_;
  bool over_socket_ = false;
  std::unique_ptr<PendingCall> call_;  // null once finished
};

// Whether crumbd may have granted room to a Reserve that ended with this status.
bool MayHaveReserved(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsCancelled(status) ||
         absl::IsUnavailable(status) || absl::IsUnknown(status);
}

}  // namespace

std::unique_ptr<PendingAcquire> StartRemoteAcquire(const AcquireRequest& request,
                                                   std::shared_ptr<ConnectionKeeper> keeper,
                                                   std::shared_ptr<Connection> connection,
                                                   uint64_t number, uint32_t verify_offset) {
  return std::make_unique<PendingLease>(request, WireRequest(request, number), std::move(keeper),
                                        std::move(connection), verify_offset);
}

std::unique_ptr<PendingAcquire> MakeFailedAcquire(absl::Status status) {
  return std::make_unique<FailedAcquire>(std::move(status));
}

absl::StatusOr<std::vector<StagingSlot>> ReserveRemote(
    int count, size_t fragment_bytes, const PendingPages& pending, uint64_t number,
    TimePoint deadline, const std::shared_ptr<ConnectionKeeper>& keeper,
    const std::shared_ptr<Connection>& connection) {
  v1::ReserveRequest request;
  request.set_count(static_cast<uint32_t>(count));
  request.set_fragment_bytes(fragment_bytes);
  request.set_request(number);
  if (!pending.keys.empty()) {
    request.set_keyspace(ToBytes(pending.keyspace));
    request.set_keys(ToBytes(pending.keys));
  }
  v1::ReserveResponse response;
  CallSocket* const calls = connection->staging_calls();
  std::unique_ptr<PendingCall> call;
  if (calls != nullptr) call = calls->Start(request, deadline, &response);
  const absl::Status reserved =
      call != nullptr
          ? call->Finish()
          : connection->stub().Call({connection->token(), deadline}, request, &response);
  if (MayHaveReserved(reserved)) keeper->GiveUpReserveLater(connection, number);
  CRUMB_RETURN_IF_ERROR(reserved);
  std::vector<StagingSlot> slots;
  for (const uint64_t offset : response.offsets()) {
    auto hold = std::make_shared<StagingHold>(keeper, connection, offset, number);
    CRUMB_ASSIGN_OR_RETURN(const std::span<std::byte> bytes,
                           connection->StagingBytes(offset, fragment_bytes));
    slots.emplace_back(bytes, offset, std::move(hold));
  }
  return slots;
}

std::unique_ptr<PendingCommit> StartRemoteCommit(const KeyspaceId& keyspace,
                                                 std::vector<StagingSlot> slots, size_t tiles_bytes,
                                                 TimePoint deadline,
                                                 std::shared_ptr<Connection> connection,
                                                 std::function<void(uint64_t)> note_mark) {
  v1::CommitRequest request;
  request.set_keyspace(ToBytes(keyspace));
  for (const StagingSlot& slot : slots) {
    if (HoldOf(slot).connection() != connection.get()) {
      return std::make_unique<FinishedCommit>(
          absl::AbortedError("the connection that staged these fragments was lost"));
    }
    request.add_offsets(slot.offset());
    request.add_reserves(HoldOf(slot).reserve());
    request.add_header_offsets(static_cast<uint32_t>(tiles_bytes));
  }
  auto pending =
      std::make_unique<RemoteCommit>(std::move(slots), std::move(connection), std::move(note_mark));
  pending->Send(request, deadline);
  return pending;
}

}  // namespace crumb::client
