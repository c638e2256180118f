// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/peer_calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/base/wire_enums.h"

namespace crumb::server {
namespace {

constexpr auto kWaitMax = std::chrono::seconds(60);
// Fragments that a PeerAcquire leases, for each page that it may name.
constexpr size_t kFragmentsPerPage = 16;
// Below gRPC's default bound of a received message, 4 MiB.
constexpr size_t kWholeBytesMax = size_t{7} << 19;

TimePoint WaitUntil(const PeerCallContext& context, uint32_t wait_ms, TimePoint deadline) {
  const Duration wait = std::min<Duration>(std::chrono::milliseconds(wait_ms), kWaitMax);
  return std::min(context.clock.Now() + wait, deadline);
}

// One PeerAcquire, until the store has called back for every run.
class PeerAcquisition : public std::enable_shared_from_this<PeerAcquisition> {
 public:
  PeerAcquisition(const PeerCallContext& context, std::string node, size_t runs,
                  v1::PeerAcquireResponse* response, PeerDone done)
      : context_(context),
        node_(std::move(node)),
        response_(response),
        done_(std::move(done)),
        open_(runs),
        results_(runs) {}

  // Leases the runs but those that the caller is referred to other nodes for.
  void Start(const std::vector<storage::AcquireRequest>& runs, const std::vector<bool>& referred) {
    for (size_t i = 0; i < runs.size(); ++i) {
      if (referred[i]) {
        Took(i, storage::AcquireResult());
        continue;
      }
      context_.store.Acquire(
          runs[i], [self = shared_from_this(), i](absl::StatusOr<storage::AcquireResult> result) {
            self->Took(i, std::move(result));
          });
    }
  }

 private:
  void Took(size_t run, absl::StatusOr<storage::AcquireResult> result) {
    {
      MutexLock lock(&mutex_);
      if (result.ok()) results_[run] = *std::move(result);
      if (--open_ > 0) return;
    }
    Respond();
  }

  // The last reference ends the call, so that no other thread is left.
  void Respond() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    std::vector<storage::LeaseId> leases;
    MissReason reason = MissReason::kNone;
    size_t pages = 0;
    for (const storage::AcquireResult& result : results_) {
      response_->add_hit_pages(result.hit_pages);
      pages += result.hit_pages;
      if (result.lease != 0) leases.push_back(result.lease);
      if (reason == MissReason::kNone) reason = result.miss_reason;
      uint32_t page = UINT32_MAX;
      for (const storage::FragmentRef& fragment : result.fragments) {
        if (fragment.page == page) continue;  // all fragments of a page have tiles of one size
        page = fragment.page;
        const auto bytes = context_.store.Bytes(fragment);
        response_->add_tile_bytes(ShapeOfHeader(bytes.subspan(fragment.tiles_bytes)).tile_bytes);
      }
    }
    response_->set_miss_reason(ToProto(reason));
    if (!leases.empty()) {
      response_->set_lease(context_.leases.Add(node_, std::move(leases), pages));
      if (response_->lease() == 0) context_.metrics.peer_leases_refused.Add();
    }
    done_(absl::OkStatus());
  }

  const PeerCallContext& context_;
  const std::string node_;
  v1::PeerAcquireResponse* const response_;
  const PeerDone done_;
  Mutex mutex_;
  size_t open_ ABSL_GUARDED_BY(mutex_);
  std::vector<storage::AcquireResult> results_ ABSL_GUARDED_BY(mutex_);
};

// Nothing is known or may be served: no run has a hit.
void RespondMisses(const v1::PeerAcquireRequest& request, v1::MissReason reason,
                   v1::PeerAcquireResponse* response) {
  for (int i = 0; i < request.runs_size(); ++i) response->add_hit_pages(0);
  response->set_miss_reason(reason);
}

// Without leases and without moving a byte.
void RespondFromLookup(const PeerCallContext& context,
                       const std::vector<storage::AcquireRequest>& runs,
                       const std::vector<bool>& referred, uint32_t tile_bytes,
                       v1::PeerAcquireResponse* response) {
  MissReason reason = MissReason::kNone;
  for (size_t i = 0; i < runs.size(); ++i) {
    if (referred[i]) {
      response->add_hit_pages(0);
      continue;
    }
    const storage::LookupResult found = context.store.Lookup(runs[i]);
    response->add_hit_pages(found.hit_pages);
    if (reason == MissReason::kNone) reason = found.miss_reason;
    for (uint32_t page = 0; page < found.hit_pages; ++page) response->add_tile_bytes(tile_bytes);
  }
  response->set_miss_reason(ToProto(reason));
}

absl::StatusOr<std::vector<storage::AcquireRequest>> RunsOf(const PeerCallContext& context,
                                                            const Keyspace& keyspace,
                                                            const v1::PeerAcquireRequest& request,
                                                            TimePoint deadline) {
  CRUMB_ASSIGN_OR_RETURN(const TileRange range, RangeOf(keyspace, request.range()));
  std::vector<storage::AcquireRequest> runs;
  std::vector<PageKey> keys;
  for (const std::string& bytes : request.runs()) {
    storage::AcquireRequest& run = runs.emplace_back();
    CRUMB_ASSIGN_OR_RETURN(run.keys, KeysOf(bytes, context.keys_max));
    keys.insert(keys.end(), run.keys.begin(), run.keys.end());
    if (keys.size() > context.keys_max) {
      return absl::InvalidArgumentError(
          fmt::format("runs hold more than {} keys", context.keys_max));
    }
    run.keyspace = keyspace.id;
    run.generation = std::max(request.generation(), keyspace.generation.load());
    run.range = range;
    run.deadline = WaitUntil(context, request.wait_ms(), deadline);
    run.fragments_max = kFragmentsPerPage * context.keys_max;
  }
  if (const auto repeated = FindDuplicate(keys)) {
    return absl::InvalidArgumentError("runs name page " + keys[*repeated].ToHex() + " twice");
  }
  return runs;
}

// Removes holders from the directory that the caller found to lack pages of a referral.
// kInvalidArgument: the request names a run that it does not have, or more holders of one run than
// a referral names.
absl::Status NoteShortfalls(const PeerCallContext& context, const v1::PeerAcquireRequest& request,
                            const std::vector<storage::AcquireRequest>& runs) {
  std::vector<size_t> nodes(runs.size(), 0);
  for (const v1::PeerShortfall& shortfall : request.not_at()) {
    if (shortfall.run() >= runs.size() ||
        ++nodes[shortfall.run()] > HolderDirectory::kReferralNodesMax) {
      return absl::InvalidArgumentError("not_at does not fit to the runs");
    }
    const storage::AcquireRequest& run = runs[shortfall.run()];
    const std::span<const PageKey> keys =
        std::span(run.keys).first(std::min(run.keys.size(), kRunPages));
    if (shortfall.pages() >= keys.size()) continue;
    context.metrics.holders_forgotten.Add();
    context.holders.Forget(shortfall.node(), run.keyspace, keys.subspan(shortfall.pages()));
  }
  return absl::OkStatus();
}

// Refers the caller to other nodes for the runs that they have more of, or that this node has
// served more often. Returns for each run whether it did.
std::vector<bool> ReferRuns(const PeerCallContext& context, const v1::PeerAcquireRequest& request,
                            const std::vector<storage::AcquireRequest>& runs,
                            v1::PeerAcquireResponse* response) {
  std::vector<bool> referred(runs.size(), false);
  if (!request.refer()) return referred;
  for (size_t i = 0; i < runs.size(); ++i) {
    HolderDirectory::Query query;
    query.requester = request.caller().node();
    query.keyspace = runs[i].keyspace;
    query.generation = runs[i].generation;
    query.range = runs[i].range;
    query.keys = runs[i].keys;
    query.counted = request.lease();
    if (!context.holders.Knows(query)) continue;
    query.own_pages = context.store.Lookup(runs[i]).hit_pages;
    std::optional<HolderDirectory::Referral> referral = context.holders.Refer(query);
    if (!referral) continue;
    referred[i] = true;
    context.metrics.referrals_given.Add();
    v1::PeerReferral* const message = response->add_referrals();
    message->set_run(static_cast<uint32_t>(i));
    message->set_pages(static_cast<uint32_t>(referral->pages));
    for (std::string& node : referral->nodes) message->add_nodes(std::move(node));
  }
  return referred;
}

}  // namespace

absl::Status CheckCaller(const PeerCallContext& context, const v1::PeerCaller& caller) {
  const v1::NodeRecord self = context.self();
  if (caller.node().empty() || caller.node().size() > kNodeIdBytesMax) {
    return absl::InvalidArgumentError("the call names no node");
  }
  if (caller.node() == self.id()) {
    return absl::FailedPreconditionError(
        "two nodes have the id " + self.id() +
        ": one's data folder was copied from the other; give it a new one");
  }
  if (caller.wire_version() < self.wire_min() || caller.wire_version() > self.wire_max()) {
    return absl::FailedPreconditionError(
        fmt::format("the call has wire version {}, this node supports {} to {}",
                    caller.wire_version(), self.wire_min(), self.wire_max()));
  }
  return absl::OkStatus();
}

void PeerHello(const PeerCallContext& context, v1::PeerHelloResponse* response) {
  *response->mutable_node() = context.self();
  response->set_keyspaces_version(context.keyspaces.version());
}

void PeerAcquire(const PeerCallContext& context, const v1::PeerAcquireRequest& request,
                 TimePoint deadline, v1::PeerAcquireResponse* response, PeerDone done) {
  const absl::Status caller = CheckCaller(context, request.caller());
  if (!caller.ok()) return done(caller);
  context.metrics.served_acquires.Add();
  if (static_cast<size_t>(request.runs_size()) > context.keys_max) {
    return done(absl::InvalidArgumentError(fmt::format("more than {} runs", context.keys_max)));
  }
  const auto id = KeyspaceId::FromBytes(request.keyspace());
  if (!id.ok()) return done(id.status());
  const auto keyspace = context.keyspaces.Find(*id);
  if (keyspace == nullptr) {
    RespondMisses(request, v1::MISS_REASON_ABSENT, response);
    return done(absl::OkStatus());
  }
  response->set_generation(keyspace->generation.load());
  if (keyspace->generation.load() > request.generation()) {
    RespondMisses(request, v1::MISS_REASON_GENERATION, response);
    return done(absl::OkStatus());
  }
  if (keyspace->unsynced()) {
    RespondMisses(request, v1::MISS_REASON_GENERATION, response);
    return done(absl::OkStatus());
  }
  if (keyspace->quality_off()) {
    RespondMisses(request, v1::MISS_REASON_QUALITY, response);
    return done(absl::OkStatus());
  }
  const auto runs = RunsOf(context, *keyspace, request, deadline);
  if (!runs.ok()) return done(runs.status());
  const std::string budget = BudgetOf(context, request.caller());
  const auto session = context.sessions.Grant(
      request.caller().node(), keyspace->id,
      budget.empty() ? PeerSessions::Who::kStranger : PeerSessions::Who::kMember);
  if (!session.ok()) return done(session.status());
  response->set_session(std::string(session->begin(), session->end()));
  if (runs->empty()) return done(absl::OkStatus());
  std::vector<bool> referred(runs->size(), false);
  if (!budget.empty()) {
    const absl::Status noted = NoteShortfalls(context, request, *runs);
    if (!noted.ok()) return done(noted);
    referred = ReferRuns(context, request, *runs, response);
  }
  if (!request.lease()) {
    RespondFromLookup(context, *runs, referred, keyspace->geometry.int2_tile_bytes(), response);
    return done(absl::OkStatus());
  }
  std::make_shared<PeerAcquisition>(context, budget, runs->size(), response, std::move(done))
      ->Start(*runs, referred);
}

absl::Status PeerRelease(const PeerCallContext& context, const v1::PeerReleaseRequest& request) {
  CRUMB_RETURN_IF_ERROR(CheckCaller(context, request.caller()));
  if (request.leases_size() > kReleasesMax) {
    return absl::InvalidArgumentError(fmt::format("more than {} leases", kReleasesMax));
  }
  const std::string node = BudgetOf(context, request.caller());
  for (const uint64_t lease : request.leases()) context.leases.Release(node, lease);
  return absl::OkStatus();
}

namespace {

void FillRecords(KeyspaceRegistry::RecordPage&& page, v1::PeerKeyspacesResponse* response) {
  for (auto& [id, record] : page.records) {
    v1::KeyspaceEntry* entry = response->add_keyspaces();
    entry->set_keyspace(std::string(id.view()));
    *entry->mutable_record() = std::move(record);
  }
}

void FillPage(const PeerCallContext& context, uint64_t after, v1::PeerKeyspacesResponse* response) {
  KeyspaceRegistry::RecordPage page =
      context.keyspaces.RecordsAfter(after, context.record_page_bytes);
  response->set_paged(true);
  response->set_next(page.next);
  response->set_more(page.more);
  response->set_incarnation(context.self().incarnation());
  FillRecords(std::move(page), response);
}

// Fills a response without pages, for callers that would take one page of records for all of them.
absl::Status FillWhole(const PeerCallContext& context, v1::PeerKeyspacesResponse* response) {
  uint64_t after = 0;
  for (bool more = true; more;) {
    KeyspaceRegistry::RecordPage page =
        context.keyspaces.RecordsAfter(after, context.record_page_bytes);
    after = page.next;
    more = page.more;
    FillRecords(std::move(page), response);
    if (response->ByteSizeLong() > kWholeBytesMax) {
      return absl::ResourceExhaustedError(
          "this node's keyspace records do not fit into one message, and the calling node's "
          "release takes no pages of them: upgrade it");
    }
  }
  return absl::OkStatus();
}

}  // namespace

void PeerKeyspaces(const PeerCallContext& context, const v1::PeerKeyspacesRequest& request,
                   v1::PeerKeyspacesResponse* response, PeerDone done) {
  const absl::Status caller = CheckCaller(context, request.caller());
  if (!caller.ok()) return done(caller);
  context.merge({request.keyspaces().begin(), request.keyspaces().end()},
                [&context, paged = request.paged(), after = request.after(), response,
                 done = std::move(done)](const absl::Status& merged) {
                  if (!paged) return done(merged.ok() ? FillWhole(context, response) : merged);
                  if (absl::IsResourceExhausted(merged)) return done(merged);
                  response->set_refused(!merged.ok());
                  FillPage(context, after, response);
                  done(absl::OkStatus());
                });
}

absl::StatusOr<transport::SourceRequest> SourceRequestOf(const PeerCallContext& context,
                                                         const v1::PeerReadRequest& request,
                                                         TimePoint deadline) {
  transport::SourceRequest wanted;
  if (request.session().size() != wanted.session.size()) {
    return absl::InvalidArgumentError("session has not 16 bytes");
  }
  std::memcpy(wanted.session.data(), request.session().data(), wanted.session.size());
  CRUMB_ASSIGN_OR_RETURN(wanted.keyspace, KeyspaceId::FromBytes(request.keyspace()));
  const auto keyspace = context.keyspaces.Find(wanted.keyspace);
  if (keyspace == nullptr) return absl::NotFoundError("unknown keyspace");
  CRUMB_ASSIGN_OR_RETURN(const TileRange range, RangeOf(*keyspace, request.range()));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, KeysOf(request.keys(), context.keys_max));
  wanted.generation = request.generation();
  wanted.deadline = WaitUntil(context, request.wait_ms(), deadline);
  for (const PageKey& key : keys) wanted.pages.push_back({key, range});
  return wanted;
}

absl::StatusOr<std::vector<PageKey>> KeysOf(const std::string& bytes, size_t keys_max) {
  if (bytes.empty() || bytes.size() % sizeof(PageKey) != 0 ||
      bytes.size() / sizeof(PageKey) > keys_max) {
    return absl::InvalidArgumentError(
        fmt::format("{} bytes are no page keys, or more than {}", bytes.size(), keys_max));
  }
  std::vector<PageKey> keys(bytes.size() / sizeof(PageKey));
  std::memcpy(keys.data(), bytes.data(), bytes.size());
  return keys;
}

absl::StatusOr<TileRange> RangeOf(const Keyspace& keyspace, const v1::TileRange& range) {
  return keyspace.CheckRange(range.layer_begin(), range.layer_end(), range.head_begin(),
                             range.head_end());
}

std::string BudgetOf(const PeerCallContext& context, const v1::PeerCaller& caller) {
  return context.peers.Find(caller.node()) == nullptr ? "" : caller.node();
}

}  // namespace crumb::server
