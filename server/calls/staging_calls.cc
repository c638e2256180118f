// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/staging_calls.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/calls/device_calls.h"
#include "server/calls/field_bounds.h"
#include "server/cluster/cluster.h"
#include "storage/store/incoming_fragment.h"

namespace crumb::server {
namespace {

// One step of a Commit: the commit threads serve other tenants behind this many bytes or fragments.
// Either takes some 500 us.
constexpr uint64_t kStepBytes = uint64_t{2} << 20;
constexpr size_t kStepFragments = 64;

// The pieces of one Commit call, until the commit threads have worked them off.
struct CommitWork {
  std::shared_ptr<Keyspace> keyspace;
  std::shared_ptr<NoticeQueue> notices;
  std::vector<std::unique_ptr<StagingArea::Piece>> pieces;
  std::vector<uint32_t> tiles_bytes;
  v1::CommitResponse* response = nullptr;
  Done done;
  TimePoint queued_at;
  size_t next = 0;                      // piece
  Duration storing = Duration::zero();  // duration of the steps so far
};

absl::StatusOr<std::shared_ptr<StagingArea>> StagingOf(const Session& session) {
  if (session.phase() != Session::Phase::kOpen) {
    return absl::UnauthenticatedError("the session is closed");
  }
  auto staging = session.staging();
  if (staging == nullptr) {
    return absl::FailedPreconditionError("the session was opened without staging memory");
  }
  return staging;
}

// `reserves` of a Commit or an Abort.
template <typename Request>
absl::Status CheckReserves(const Request& request) {
  if (request.reserves().empty() || request.reserves_size() == request.offsets_size()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(fmt::format("reserves has {} entries, offsets {}",
                                                request.reserves_size(), request.offsets_size()));
}

template <typename Request>
uint64_t ReserveOf(const Request& request, int index) {
  return request.reserves().empty() ? 0 : request.reserves(index);
}

absl::Status CheckQuota(const CallContext& context, const Keyspace& keyspace, uint64_t bytes) {
  if (context.quotas == nullptr || keyspace.tenant.empty()) return absl::OkStatus();
  const auto tenant = context.tenants->Find(keyspace.tenant);
  return tenant == nullptr ? absl::OkStatus() : context.quotas->Take(*tenant, bytes);
}

// Commits the next pieces. Returns true if there are more.
bool RunCommitStep(const CallContext& context, CommitWork& work) {
  const TimePoint started = context.clock.Now();
  if (work.next == 0) {
    // Before any of them can be lost.
    work.response->set_flush_mark(context.store.FlushMark(FlushScopeOf(context)));
    context.metrics.stages.of(Stage::kCommitQueue).Observe(SecondsBetween(work.queued_at, started));
  }
  const size_t end = std::min(work.pieces.size(), work.next + kStepFragments);
  for (uint64_t bytes = 0; work.next < end && bytes < kStepBytes; ++work.next) {
    std::unique_ptr<StagingArea::Piece>& piece = work.pieces[work.next];
    const uint32_t tiles_bytes = work.tiles_bytes[work.next];
    std::string why;
    bytes += piece->bytes().size();
    work.response->add_outcomes(
        CommitFragment(context, *work.keyspace, piece->bytes(), tiles_bytes, work.notices, &why));
    context.metrics.shm_bytes_in.Add(tiles_bytes);
    if (!why.empty() && work.response->first_error().empty()) work.response->set_first_error(why);
    piece.reset();
  }
  work.storing += context.clock.Now() - started;
  if (work.next < work.pieces.size()) return true;
  context.metrics.stages.of(Stage::kCommitStore)
      .Observe(std::chrono::duration<double>(work.storing).count());
  work.done(absl::OkStatus());
  return false;
}

// Returns whether the first step does all of the work.
bool IsOneStep(const CommitWork& work) {
  uint64_t bytes = 0;
  for (const auto& piece : work.pieces) bytes += piece->bytes().size();
  return work.pieces.size() <= kStepFragments && bytes <= kStepBytes;
}

}  // namespace

absl::Status Reserve(const CallContext& context, const Session& session,
                     const v1::ReserveRequest& request, v1::ReserveResponse* response) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  if (!request.pool().empty()) return ReserveSlots(context, session, request, response);
  CRUMB_ASSIGN_OR_RETURN(const auto staging, StagingOf(session));
  CRUMB_RETURN_IF_ERROR(CheckCount(context.limits, "count", request.count()));
  const uint64_t bytes = request.fragment_bytes();
  if (bytes == 0 || bytes > context.limits.fragment_bytes_max.value) {
    return absl::InvalidArgumentError(
        fmt::format("fragment_bytes is {}, must be from 1 to limits.fragment_bytes_max, {}", bytes,
                    context.limits.fragment_bytes_max.value));
  }
  if (!request.keys().empty()) {
    CRUMB_ASSIGN_OR_RETURN(const auto keyspace, FindKeyspace(context, request.keyspace()));
    CRUMB_ASSIGN_OR_RETURN(const auto keys, ReadKeys(context, request.keys(), Repeats::kAllowed));
    context.store.SetPending(keyspace->id, keyspace->tenant, keys);
  }
  for (uint32_t i = 0; i < request.count(); ++i) {
    uint64_t offset = 0;
    if (!staging->Reserve(bytes, offset, request.request())) break;
    response->add_offsets(offset);
  }
  return absl::OkStatus();
}

void Commit(const CallContext& context, const Session& session, const v1::CommitRequest& request,
            v1::CommitResponse* response, Done done, CommitHere here) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  if (!request.pool().empty()) return done(CommitSlots(context, session, request, response));
  const auto staging = StagingOf(session);
  if (!staging.ok()) return done(staging.status());
  const absl::Status counted = CheckCount(context.limits, "offsets", request.offsets_size());
  if (!counted.ok()) return done(counted);
  const auto work = std::make_shared<CommitWork>();
  const absl::Status named = CheckReserves(request);
  if (!named.ok()) return done(named);
  bool all_reserved = true;
  for (int i = 0; i < request.offsets_size(); ++i) {
    work->pieces.push_back(StagingArea::Take(*staging, request.offsets(i), ReserveOf(request, i)));
    all_reserved &= work->pieces.back() != nullptr;
  }
  if (!all_reserved) return done(absl::InvalidArgumentError("offsets: one is not reserved"));
  if (request.header_offsets_size() != request.offsets_size()) {
    return done(absl::InvalidArgumentError(fmt::format("header_offsets has {} entries, offsets {}",
                                                       request.header_offsets_size(),
                                                       request.offsets_size())));
  }
  auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  work->keyspace = *keyspace;
  work->notices = session.notices();
  work->tiles_bytes.assign(request.header_offsets().begin(), request.header_offsets().end());
  work->response = response;
  work->queued_at = context.clock.Now();
  work->done = std::move(done);
  if (here == CommitHere::kIfSmall && IsOneStep(*work)) {
    RunCommitStep(context, *work);
    return;
  }
  const bool queued = context.commits.SubmitSteps(
      context.caller.name(), [context, work] { return RunCommitStep(context, *work); });
  if (queued) return;
  context.metrics.Reject(Rejection::kCommitQueue);
  work->pieces.clear();
  work->done(absl::ResourceExhaustedError(
      "limits.commit_queue, or the tenant's part of it, is reached, try again"));
}

absl::Status Abort(const CallContext& context, const Session& session,
                   const v1::AbortRequest& request) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  CRUMB_ASSIGN_OR_RETURN(const auto staging, StagingOf(session));
  for (const uint64_t number : request.requests()) staging->GiveUp(number);
  if (request.offsets().empty() && !request.requests().empty()) return absl::OkStatus();
  CRUMB_RETURN_IF_ERROR(CheckCount(context.limits, "offsets", request.offsets_size()));
  CRUMB_RETURN_IF_ERROR(CheckReserves(request));
  uint32_t unknown = 0;
  for (int i = 0; i < request.offsets_size(); ++i) {
    if (!staging->Abort(request.offsets(i), ReserveOf(request, i))) ++unknown;
  }
  if (unknown == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("offsets: {} are not reserved", unknown));
}

void WithdrawReserve(const Session& session, uint64_t request,
                     const v1::ReserveResponse& response) {
  const auto staging = session.staging();
  if (staging == nullptr) return;
  for (const uint64_t offset : response.offsets()) staging->Abort(offset, request);
}

v1::CommitOutcome CommitFragment(const CallContext& context, const Keyspace& keyspace,
                                 std::span<const std::byte> fragment, uint32_t tiles_bytes,
                                 const std::shared_ptr<NoticeQueue>& notices, std::string* why) {
  const auto refuse = [&](Refusal reason, const absl::Status& status) {
    context.metrics.Refuse(reason);
    *why = status.ToString();
    const bool back_off = reason == Refusal::kNoRoom || reason == Refusal::kQuota;
    return back_off ? v1::COMMIT_OUTCOME_NO_ROOM : v1::COMMIT_OUTCOME_REFUSED;
  };
  if (tiles_bytes >= fragment.size()) {
    return refuse(Refusal::kInvalid, absl::InvalidArgumentError(fmt::format(
                                         "header_offsets: {} is not within the {} bytes reserved",
                                         tiles_bytes, fragment.size())));
  }
  // The writer may change the bytes at any time. The header is taken once, and every check here and
  // in the store is of this copy; the store reads each byte of the tiles once.
  const auto header_bytes = fragment.subspan(tiles_bytes);
  const size_t header_max = FragmentHeaderBytes(keyspace.geometry.all_tiles().tiles());
  storage::CommitRequest request;
  absl::StatusOr<FragmentHeader> header = storage::TakeHeader(header_bytes, header_max);
  if (!header.ok()) return refuse(Refusal::kChecksum, header.status());
  request.header = *std::move(header);
  const absl::Status belongs = keyspace.CheckHeader(request.header);
  if (!belongs.ok()) return refuse(Refusal::kInvalid, belongs);
  if (header_bytes.size() != FragmentHeaderBytes(request.header.range.tiles())) {
    return refuse(Refusal::kInvalid, absl::InvalidArgumentError(
                                         "the fragment's size differs from what its header says"));
  }
  const absl::Status quota = CheckQuota(context, keyspace, fragment.size());
  if (!quota.ok()) return refuse(Refusal::kQuota, quota);
  request.tiles = fragment.first(tiles_bytes);
  request.logical_tile_bytes = keyspace.geometry.bf16_tile_bytes();
  const absl::StatusOr<CommitOutcome> outcome = context.store.Commit(request);
  if (absl::IsResourceExhausted(outcome.status())) {
    return refuse(Refusal::kNoRoom, outcome.status());
  }
  if (!outcome.ok()) {
    return refuse(absl::IsDataLoss(outcome.status()) ? Refusal::kChecksum : Refusal::kInvalid,
                  outcome.status());
  }
  if (notices != nullptr) context.events.AwaitDurable(request.header, notices);
  if (*outcome == CommitOutcome::kDeduplicated) return v1::COMMIT_OUTCOME_DEDUPLICATED;
  if (context.cluster != nullptr) context.cluster->Committed(request.header);
  return v1::COMMIT_OUTCOME_STORED;
}

}  // namespace crumb::server
