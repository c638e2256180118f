// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// PeerPush: the home's handling of pages that another node offers.
#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "common/status_macros.h"
#include "server/base/wire_enums.h"
#include "server/cluster/peer_calls.h"

namespace crumb::server {
namespace {

// One part in so many of the time for fetching offered pages is left for the response.
constexpr int kResponseFraction = 8;

// An offer whose fields were checked.
struct CheckedOffer {
  OfferedPages pages;              // those that are to be fetched; their keys are distinct
  std::vector<uint32_t> indices;   // index of each page in the request's keys
  std::vector<OfferedPages> rest;  // parts of the same pages that other nodes hold
  uint32_t noted = 0;              // pages that are not here, and are not to be fetched
};

bool IsHere(const PeerCallContext& context, const Keyspace& keyspace, const PageKey& key,
            const TileRange& range) {
  storage::AcquireRequest one;
  one.keyspace = keyspace.id;
  one.generation = keyspace.generation.load();
  one.keys = {key};
  one.range = range;
  return context.store.Lookup(one).hit_pages > 0;
}

void NoteHolder(const PeerCallContext& context, const v1::PeerPushRequest& request,
                const OfferedPages& offered, const std::vector<PageKey>& keys) {
  // Pages of an older generation than this node's are not to be referred to.
  const uint64_t generation = offered.keyspace->generation.load();
  if (request.keyspace().record().generation() < generation) return;
  HolderDirectory::Offer offer;
  offer.node = offered.from->id();
  offer.keyspace = offered.keyspace->id;
  offer.tenant = offered.keyspace->tenant;
  offer.generation = generation;
  offer.range = offered.range;
  offer.keys = keys;
  offer.tile_bytes.assign(request.tile_bytes().begin(), request.tile_bytes().end());
  offer.session = offered.session;
  context.holders.Note(offer);
}

// Adds the parts of a page that nodes other than the caller hold and this node lacks, if no holder
// has all of them: a reader of the whole page could be referred to no node. Returns whether the
// page is such a one.
bool AddParts(const PeerCallContext& context, const OfferedPages& offered, const PageKey& key,
              std::vector<OfferedPages>& rest) {
  const Keyspace& keyspace = *offered.keyspace;
  if (offered.range == keyspace.geometry.all_tiles()) return false;
  const auto parts = context.holders.PartsOf(keyspace.id, keyspace.generation.load(), key);
  for (const HolderDirectory::Part& part : parts) {
    if (part.node == offered.from->id() || IsHere(context, keyspace, key, part.range)) continue;
    auto group = std::find_if(rest.begin(), rest.end(), [&](const OfferedPages& each) {
      return each.from->id() == part.node && each.range == part.range;
    });
    if (group == rest.end()) {
      auto from = context.peers.Find(part.node);
      if (from == nullptr) continue;
      OfferedPages fresh = offered;
      fresh.from = std::move(from);
      fresh.range = part.range;
      fresh.session = part.session;
      fresh.keys.clear();
      fresh.tile_bytes.clear();
      group = rest.insert(rest.end(), std::move(fresh));
    }
    group->keys.push_back(key);
    group->tile_bytes.push_back(part.tile_bytes);
  }
  return !parts.empty();
}

absl::StatusOr<CheckedOffer> CheckOffer(const PeerCallContext& context,
                                        const v1::PeerPushRequest& request, TimePoint deadline) {
  CheckedOffer offer;
  OfferedPages& offered = offer.pages;
  CRUMB_ASSIGN_OR_RETURN(const KeyspaceId id, KeyspaceId::FromBytes(request.keyspace().keyspace()));
  offered.keyspace = context.keyspaces.Find(id);
  offered.from = context.peers.Find(request.caller().node());
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, KeysOf(request.keys(), context.keys_max));
  if (offered.keyspace == nullptr || offered.from == nullptr) {
    return absl::AbortedError("this node does not know the caller or the keyspace yet");
  }
  if (static_cast<size_t>(request.tile_bytes_size()) != keys.size() ||
      request.session().size() != offered.session.size()) {
    return absl::InvalidArgumentError("keys, tile_bytes and session do not fit together");
  }
  CRUMB_ASSIGN_OR_RETURN(offered.range, RangeOf(*offered.keyspace, request.range()));
  std::memcpy(offered.session.data(), request.session().data(), offered.session.size());
  const TimePoint now = context.clock.Now();
  offered.deadline = std::min(now + context.push_deadline, deadline);
  // Pages that have come by then are reported in time.
  if (offered.deadline > now) offered.deadline -= (offered.deadline - now) / kResponseFraction;
  NoteHolder(context, request, offered, keys);
  const bool copies =
      request.leaving() || (context.push_policy == PushPolicy::kAlways && !request.note_only());
  absl::flat_hash_set<PageKey> seen;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!seen.insert(keys[i]).second) continue;
    if (IsHere(context, *offered.keyspace, keys[i], offered.range)) continue;
    if (!copies && !AddParts(context, offered, keys[i], offer.rest)) {
      ++offer.noted;
      continue;
    }
    offer.indices.push_back(static_cast<uint32_t>(i));
    offered.keys.push_back(keys[i]);
    offered.tile_bytes.push_back(request.tile_bytes(static_cast<int>(i)));
  }
  return offer;
}

// The keyspace is known here: notes who has the pages, and fetches those of which there has to be a
// copy.
void TakeOffer(const PeerCallContext& context, const v1::PeerPushRequest& request,
               TimePoint deadline, v1::PeerPushResponse* response, const PeerDone& done) {
  absl::StatusOr<CheckedOffer> offer = CheckOffer(context, request, deadline);
  if (!offer.ok()) return done(offer.status());
  size_t pages = offer->pages.keys.size();
  for (const OfferedPages& part : offer->rest) pages += part.keys.size();
  std::shared_ptr<const PartyBudget::Hold> budget =
      context.push_pages.Take(request.caller().node(), pages);
  if (budget == nullptr) {
    context.metrics.peer_pushes_refused.Add();
    return done(absl::ResourceExhaustedError(
        "cluster.peer_push_pages_max pages of this node's offers are being fetched"));
  }
  context.metrics.noted_pages.Add(offer->noted);
  response->set_noted(offer->noted);
  response->set_deduplicated(static_cast<uint32_t>(request.keys().size() / sizeof(PageKey) -
                                                   offer->pages.keys.size() - offer->noted));
  for (OfferedPages& part : offer->rest) {
    context.reader.Take(std::move(part), [&context, budget](const auto& reasons) {
      context.metrics.received_pages.Add(
          static_cast<uint64_t>(std::count(reasons.begin(), reasons.end(), MissReason::kNone)));
    });
  }
  context.reader.Take(std::move(offer->pages), [&context, response, indices = offer->indices, done,
                                                budget](const auto& reasons) mutable {
    budget.reset();
    for (size_t i = 0; i < reasons.size(); ++i) {
      if (reasons[i] == MissReason::kNone) continue;
      response->add_failed_pages(indices[i]);
      response->add_failed_reasons(ToProto(reasons[i]));
    }
    const auto failed = static_cast<uint32_t>(response->failed_pages_size());
    const auto stored = static_cast<uint32_t>(reasons.size()) - failed;
    context.metrics.received_pages.Add(stored);
    response->set_stored(stored);
    response->set_failed(failed);
    done(absl::OkStatus());
  });
}

}  // namespace

void PeerPush(const PeerCallContext& context, const v1::PeerPushRequest& request,
              TimePoint deadline, v1::PeerPushResponse* response, PeerDone done) {
  const absl::Status caller = CheckCaller(context, request.caller());
  if (!caller.ok()) return done(caller);
  const auto id = KeyspaceId::FromBytes(request.keyspace().keyspace());
  if (!id.ok()) return done(id.status());
  const auto known = context.keyspaces.Find(*id);
  if (known != nullptr && known->generation.load() >= request.keyspace().record().generation()) {
    return TakeOffer(context, request, deadline, response, done);
  }
  context.merge({request.keyspace()},
                [&context, &request, deadline, response, done](const absl::Status& merged) {
                  if (!merged.ok()) return done(merged);
                  TakeOffer(context, request, deadline, response, done);
                });
}

}  // namespace crumb::server
