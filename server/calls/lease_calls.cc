// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/lease_calls.h"

#include <algorithm>
#include <array>
#include <utility>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/calls/cluster_acquire.h"
#include "server/calls/device_calls.h"
#include "server/calls/field_bounds.h"
#include "server/calls/prefetch_budget.h"
#include "server/calls/store_request.h"
#include "server/device/device_pools.h"

namespace crumb::server {
namespace {

TokenTier TokenTierOf(Tier tier) {
  switch (tier) {
    case Tier::kDevice:
      return TokenTier::kDevice;
    case Tier::kSsd:
      return TokenTier::kSsd;
    case Tier::kRemote:
      return TokenTier::kRemote;
    case Tier::kUnknown:
    case Tier::kHost:
      break;
  }
  return TokenTier::kHost;
}

// Sends the process the slabs of these fragments that it does not map. Returns false if the process
// cannot receive them.
bool GrantSlabs(const CallContext& context, const Session& session, const KeyspaceId& keyspace,
                const std::vector<storage::FragmentRef>& fragments) {
  const auto slabs = session.slabs();
  if (slabs == nullptr) return true;
  if (slabs->Grant(context.store, keyspace, fragments).ok()) return true;
  context.metrics.Reject(Rejection::kSlabGrant);
  return false;
}

// Returns the bytes of all tiles.
uint64_t FillFragments(const std::vector<storage::FragmentRef>& found, v1::Fragments* fragments) {
  const int count = static_cast<int>(found.size());
  fragments->mutable_pages()->Reserve(count);
  fragments->mutable_slabs()->Reserve(count);
  fragments->mutable_offsets()->Reserve(count);
  fragments->mutable_header_offsets()->Reserve(count);
  uint64_t bytes = 0;
  for (const storage::FragmentRef& fragment : found) {
    fragments->mutable_pages()->AddAlreadyReserved(fragment.page);
    fragments->mutable_slabs()->AddAlreadyReserved(fragment.slab);
    fragments->mutable_offsets()->AddAlreadyReserved(fragment.offset);
    fragments->mutable_header_offsets()->AddAlreadyReserved(fragment.tiles_bytes);
    bytes += fragment.tiles_bytes;
  }
  return bytes;
}

// One Acquire until its response; counts its tokens on destruction, after errors too.
class Acquisition {
 public:
  Acquisition(const CallContext& context, std::shared_ptr<Session> session,
              std::shared_ptr<Keyspace> keyspace, const v1::AcquireRequest& request,
              v1::AcquireResponse* response, Done done)
      : context_(context),
        session_(std::move(session)),
        keyspace_(std::move(keyspace)),
        pages_(request.keys().size() / sizeof(PageKey)),
        window_tokens_(request.window_tokens()),
        request_(request),
        response_(response),
        done_(std::move(done)),
        started_(context.clock.Now()) {}

  Engine& engine() const { return session_->engine(); }

  // Responds that no page is a hit.
  void Miss(v1::MissReason reason) {
    response_->set_miss_reason(reason);
    CountTokens({});
    done_(absl::OkStatus());
  }

  // `taken` pages were taken off the engine's budget, fewer than the request has if it was `cut`.
  void Finish(absl::StatusOr<storage::AcquireResult> result, uint64_t taken, bool cut) {
    context_.metrics.stages.of(Stage::kAcquireStore)
        .Observe(SecondsBetween(started_, context_.clock.Now()));
    if (!result.ok()) {
      engine().AddLease(0, 0, taken, session_->token());
      CountTokens({});
      return done_(result.status());
    }
    if (result->part_full) {
      context_.metrics.Reject(Rejection::kHeldMemory, TenantBudget::Taken::kPartFull);
    }
    if (!GrantSlabs(context_, *session_, keyspace_->id, result->fragments)) {
      engine().AddLease(0, 0, taken, session_->token());
      context_.store.Release(result->lease);
      return Miss(v1::MISS_REASON_BUSY);
    }
    if (!engine().AddLease(result->lease, result->hit_pages, taken, session_->token())) {
      context_.store.Release(result->lease);
      CountTokens({});
      return done_(absl::UnauthenticatedError("the session ended"));
    }
    // The process may have died meanwhile, and its leases have ended.
    if (session_->phase() == Session::Phase::kEnded) {
      context_.sessions.Release(*session_, result->lease);
      CountTokens({});
      return done_(absl::UnauthenticatedError("the session ended"));
    }
    // SessionTable ends a disconnected session without leases, with its engine: it may not have
    // seen this one.
    if (session_->phase() != Session::Phase::kOpen) {
      context_.sessions.Release(*session_, result->lease);
      CountTokens({});
      return done_(absl::UnauthenticatedError("the session is closed"));
    }
    if (!session_->acquires().Finish(request_.request(), result->lease)) {
      context_.sessions.Release(*session_, result->lease);
      CountTokens({});
      return done_(absl::CancelledError("the caller gave the request up"));
    }
    Fill(*result, cut);
    CountTokens(result->page_tiers);
    done_(absl::OkStatus());
  }

 private:
  void Fill(const storage::AcquireResult& result, bool cut) {
    response_->set_lease(result.lease);
    response_->set_hit_pages(result.hit_pages);
    auto& tiers = *response_->mutable_page_tiers();
    tiers.Reserve(static_cast<int>(result.page_tiers.size()));
    for (const Tier tier : result.page_tiers) tiers.AddAlreadyReserved(ToProto(tier));
    context_.metrics.shm_bytes_out.Add(
        FillFragments(result.fragments, response_->mutable_fragments()));
    FillDeviceFragments(context_, *session_, request_, result.device_fragments,
                        response_->mutable_device_fragments());
    const bool complete = result.miss_reason == MissReason::kNone;
    response_->set_miss_reason(complete && cut ? v1::MISS_REASON_BUSY
                                               : ToProto(result.miss_reason));
    if (complete && cut) context_.metrics.Reject(Rejection::kLeaseBudget);
    if (result.miss_reason == MissReason::kDeadline) {
      context_.metrics.deadline_exceeded.Add();
    }
  }

  void CountTokens(const std::vector<Tier>& hits) {
    std::array<uint64_t, kTokenTierCount> tokens{};
    for (const Tier tier : hits) {
      tokens[static_cast<size_t>(TokenTierOf(tier))] += kPageTokens;
    }
    for (int tier = 0; tier < kTokenTierCount; ++tier) {
      if (tokens[static_cast<size_t>(tier)] == 0) continue;
      context_.metrics.fetched_tokens[static_cast<size_t>(tier)].Add(
          tokens[static_cast<size_t>(tier)]);
    }
    tokens[static_cast<size_t>(TokenTier::kMiss)] = (pages_ - hits.size()) * kPageTokens;
    tokens[static_cast<size_t>(TokenTier::kWindow)] = window_tokens_;
    for (int tier = 0; tier < kTokenTierCount; ++tier) {
      keyspace_->tokens->Add(static_cast<TokenTier>(tier), tokens[static_cast<size_t>(tier)]);
    }
  }

  const CallContext context_;
  const std::shared_ptr<Session> session_;
  const std::shared_ptr<Keyspace> keyspace_;
  const size_t pages_;
  const uint64_t window_tokens_;
  const v1::AcquireRequest& request_;  // the caller's, until `done_`
  v1::AcquireResponse* const response_;
  const Done done_;
  const TimePoint started_;
};

absl::Status CheckPeerSums(const Keyspace& keyspace, const v1::AcquireRequest& request) {
  if (!request.has_peer_sums()) return absl::OkStatus();
  return ReadRange(keyspace, request.peer_sums()).status();
}

// Responds from a lease that another session of the engine holds. No tokens are counted: its own
// Acquire did.
absl::Status JoinLease(const CallContext& context, Session& session,
                       const v1::AcquireRequest& request, v1::AcquireResponse* response) {
  CRUMB_ASSIGN_OR_RETURN(const auto keyspace, FindKeyspace(context, request.keyspace()));
  TileRange range = keyspace->geometry.all_tiles();
  if (request.has_range()) {
    CRUMB_ASSIGN_OR_RETURN(range, ReadRange(*keyspace, request.range()));
  }
  CRUMB_RETURN_IF_ERROR(CheckPeerSums(*keyspace, request));
  response->set_miss_reason(v1::MISS_REASON_ABSENT);
  if (!context.sessions.Join(session, request.lease())) return absl::OkStatus();
  if (!session.acquires().Finish(request.request(), request.lease())) {
    context.sessions.Release(session, request.lease());
    return absl::CancelledError("the caller gave the request up");
  }
  const std::optional<storage::LeasedPages> leased =
      context.store.ReadLease(request.lease(), range);
  if (!leased.has_value()) {
    context.sessions.Release(session, request.lease());
    return absl::OkStatus();
  }
  const size_t fragments = leased->fragments.size() + leased->device_fragments.size();
  if (fragments > static_cast<size_t>(context.limits.response_fragments_max)) {
    context.sessions.Release(session, request.lease());
    return absl::ResourceExhaustedError(
        fmt::format("the lease has {} fragments in this range, limits.response_fragments_max is {}",
                    fragments, context.limits.response_fragments_max));
  }
  if (!GrantSlabs(context, session, keyspace->id, leased->fragments)) {
    context.sessions.Release(session, request.lease());
    response->set_miss_reason(v1::MISS_REASON_BUSY);
    return absl::OkStatus();
  }
  response->set_lease(request.lease());
  response->set_hit_pages(leased->pages);
  response->set_miss_reason(v1::MISS_REASON_UNSPECIFIED);
  context.metrics.shm_bytes_out.Add(
      FillFragments(leased->fragments, response->mutable_fragments()));
  FillDeviceFragments(context, session, request, leased->device_fragments,
                      response->mutable_device_fragments());
  return absl::OkStatus();
}

}  // namespace

void Acquire(const CallContext& context, std::shared_ptr<Session> session, TimePoint deadline,
             const v1::AcquireRequest& request, v1::AcquireResponse* response, Done done) {
  response->Clear();
  if (session->phase() != Session::Phase::kOpen) {
    return done(absl::UnauthenticatedError("the session is closed"));
  }
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  if (const absl::Status named = CheckNamedPools(context, request); !named.ok()) {
    return done(named);
  }
  if (request.lease() != 0) return done(JoinLease(context, *session, request, response));
  auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  auto wanted = MakeStoreRequest(context, **keyspace, request, request.wait_ms(), deadline);
  if (!wanted.ok()) return done(wanted.status());
  wanted->pools = PoolsOf(context, *session, request);
  const absl::Status sums = CheckPeerSums(**keyspace, request);
  if (!sums.ok()) return done(sums);
  if (request.window_tokens() >
      static_cast<uint32_t>(context.limits.acquire_keys_max) * static_cast<uint32_t>(kPageTokens)) {
    return done(absl::InvalidArgumentError(
        fmt::format("window_tokens is {}, at most {} times limits.acquire_keys_max",
                    request.window_tokens(), kPageTokens)));
  }
  context.metrics.requested_pages.Add(wanted->keys, context.clock.Now());
  const auto acquisition = std::make_shared<Acquisition>(context, std::move(session), *keyspace,
                                                         request, response, std::move(done));
  if ((*keyspace)->quality_off()) return acquisition->Miss(v1::MISS_REASON_QUALITY);
  if ((*keyspace)->unsynced()) return acquisition->Miss(v1::MISS_REASON_GENERATION);
  if (request.behind_miss()) return acquisition->Miss(v1::MISS_REASON_ABSENT);
  const uint64_t taken = acquisition->engine().TakeBudget(wanted->keys.size());
  if (taken == 0) {
    context.metrics.Reject(Rejection::kLeaseBudget);
    return acquisition->Miss(v1::MISS_REASON_BUSY);
  }
  const bool cut = wanted->keys.size() > taken;
  if (cut) wanted->keys.resize(taken);
  AcquireAnywhere(context, MakeClusterRequest(*keyspace, *std::move(wanted), request),
                  [acquisition, taken, cut](absl::StatusOr<storage::AcquireResult> result) {
                    acquisition->Finish(std::move(result), taken, cut);
                  });
}

void Lookup(const CallContext& context, TimePoint deadline, const v1::LookupRequest& request,
            v1::LookupResponse* response, Done done) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  const auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  auto wanted = MakeStoreRequest(context, **keyspace, request, request.wait_ms(), deadline);
  if (!wanted.ok()) return done(wanted.status());
  if (context.pools != nullptr) {
    wanted->pools = context.pools->AllOf(context.tenants == nullptr ? "" : (*keyspace)->tenant);
  }
  if ((*keyspace)->quality_off()) {
    response->set_miss_reason(v1::MISS_REASON_QUALITY);
    return done(absl::OkStatus());
  }
  if ((*keyspace)->unsynced()) {
    response->set_miss_reason(v1::MISS_REASON_GENERATION);
    return done(absl::OkStatus());
  }
  FindAnywhere(context, MakeClusterRequest(*keyspace, *std::move(wanted), request),
               [response, done = std::move(done)](const FoundPages& found) {
                 response->set_hit_pages(static_cast<uint32_t>(found.tiers.size()));
                 for (const Tier tier : found.tiers) {
                   response->add_page_tiers(ToProto(tier));
                 }
                 for (const std::string& node : found.nodes) response->add_nodes(node);
                 response->mutable_page_nodes()->Add(found.page_nodes.begin(),
                                                     found.page_nodes.end());
                 response->set_miss_reason(ToProto(found.miss_reason));
                 done(absl::OkStatus());
               });
}

absl::Status Release(const CallContext& context, Session& session,
                     const v1::ReleaseRequest& request, v1::ReleaseResponse* response) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  if (!request.pool().empty()) CRUMB_RETURN_IF_ERROR(ReleaseSlots(context, session, request));
  uint32_t unknown = 0;
  for (const uint64_t lease : request.leases()) {
    if (!context.sessions.Release(session, lease)) ++unknown;
  }
  response->set_unknown(unknown);
  for (const uint64_t given_up : request.requests()) {
    context.sessions.Release(session, session.acquires().Abandon(given_up));
  }
  return absl::OkStatus();
}

absl::Status Prefetch(const CallContext& context, const v1::PrefetchRequest& request,
                      v1::PrefetchResponse* response) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  CRUMB_ASSIGN_OR_RETURN(const auto keyspace, FindKeyspace(context, request.keyspace()));
  CRUMB_ASSIGN_OR_RETURN(
      storage::AcquireRequest wanted,
      MakeStoreRequest(context, *keyspace, request, UINT32_MAX, TimePoint::max()));
  if (!keyspace->serves()) return absl::OkStatus();
  const storage::LookupResult there = context.store.Lookup(wanted);
  response->set_queued_pages(static_cast<uint32_t>(
      std::count(there.page_tiers.begin(), there.page_tiers.end(), Tier::kSsd)));
  if (context.cluster != nullptr && MayBeElsewhere(there.miss_reason)) {
    response->set_requested_pages(static_cast<uint32_t>(wanted.keys.size()) - there.hit_pages);
  } else {
    wanted.keys.resize(there.hit_pages);
  }
  if (response->queued_pages() + response->requested_pages() == 0) return absl::OkStatus();
  std::shared_ptr<PrefetchBudget::Place> place;
  if (context.prefetches != nullptr) {
    place = context.prefetches->Take(context.tenants == nullptr ? "" : keyspace->tenant);
    if (place == nullptr) {
      context.metrics.Reject(Rejection::kPrefetches);
      response->Clear();
      return absl::ResourceExhaustedError(
          "limits.prefetches_max or limits.tenant_prefetches_max is reached, try again");
    }
  }
  ClusterAcquireRequest anywhere = MakeClusterRequest(keyspace, std::move(wanted), request);
  anywhere.awaited = false;
  storage::TieredStore& store = context.store;
  AcquireAnywhere(context, std::move(anywhere),
                  [&store, place](const absl::StatusOr<storage::AcquireResult>& result) {
                    if (result.ok() && result->lease != 0) store.Release(result->lease);
                  });
  return absl::OkStatus();
}

}  // namespace crumb::server
