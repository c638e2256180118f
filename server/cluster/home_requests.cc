// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/home_requests.h"

#include <algorithm>
#include <map>
#include <utility>

namespace crumb::server {

std::vector<RunSpan> RunsOf(const PullRequest& request) {
  std::vector<RunSpan> runs;
  size_t begin = 0;
  while (begin < request.keys.size()) {
    const size_t within = (request.first_page + begin) % kRunPages;
    const size_t end = std::min(request.keys.size(), begin + kRunPages - within);
    const PageKey& key = within == 0 ? request.keys[begin] : request.run;
    // Without the name of a run that begins before the request its homes are unknown.
    if (key != PageKey{} || request.everyone) runs.push_back({key, begin, end});
    begin = end;
  }
  return runs;
}

std::vector<std::optional<Tier>> TiersHere(storage::TieredStore& store,
                                           const PullRequest& request) {
  std::vector<std::optional<Tier>> tiers(request.keys.size());
  storage::AcquireRequest one;
  one.keyspace = request.keyspace->id;
  one.generation = request.keyspace->generation.load();
  one.range = request.range;
  for (size_t page = 0; page < tiers.size(); ++page) {
    one.keys.assign(1, request.keys[page]);
    const storage::LookupResult found = store.Lookup(one);
    if (found.hit_pages > 0) tiers[page] = found.page_tiers.front();
  }
  return tiers;
}

std::vector<HomeRequest> HomeRequestsFor(const PullContext& context,
                                         const std::vector<PageKey>& runs, bool everyone) {
  std::vector<HomeRequest> requests;
  std::map<std::string, size_t> by_node;
  const PeerTable::Peers all = everyone ? context.peers.All() : PeerTable::Peers();
  for (size_t index = 0; index < runs.size(); ++index) {
    for (const auto& peer : everyone ? all : context.peers.HomesToQuery(runs[index])) {
      const auto [entry, is_new] = by_node.try_emplace(peer->id(), requests.size());
      if (is_new) {
        // A node whose breaker is open stays listed without runs, so that it is skipped for all.
        const bool allowed = peer->breaker().Allow();
        if (!allowed) context.metrics.breaker_skips.Add();
        requests.push_back({allowed ? peer : nullptr, {}});
      }
      HomeRequest& home_request = requests[entry->second];
      if (home_request.peer != nullptr) home_request.runs.push_back(index);
    }
  }
  std::erase_if(requests,
                [](const HomeRequest& home_request) { return home_request.peer == nullptr; });
  return requests;
}

std::optional<HolderDirectory::Referral> OwnReferral(const PullContext& context,
                                                     const PullRequest& request, const PageKey& run,
                                                     const std::vector<size_t>& pages,
                                                     bool counted) {
  if (context.holders == nullptr || request.everyone || !context.peers.IsHome(run)) {
    return std::nullopt;
  }
  std::vector<PageKey> keys;
  keys.reserve(pages.size());
  for (const size_t page : pages) keys.push_back(request.keys[page]);
  HolderDirectory::Query query;
  query.keyspace = request.keyspace->id;
  query.generation = request.keyspace->generation.load();
  query.range = request.range;
  query.keys = keys;
  query.counted = counted;
  return context.holders->Refer(query);
}

v1::PeerAcquireRequest MakePeerAcquire(const PullRequest& request, std::vector<std::string> runs) {
  v1::PeerAcquireRequest wanted;
  wanted.set_keyspace(std::string(request.keyspace->id.view()));
  wanted.set_generation(request.keyspace->generation.load());
  wanted.mutable_range()->set_layer_begin(request.range.layers.begin);
  wanted.mutable_range()->set_layer_end(request.range.layers.end);
  wanted.mutable_range()->set_head_begin(request.range.heads.begin);
  wanted.mutable_range()->set_head_end(request.range.heads.end);
  for (std::string& run : runs) wanted.add_runs(std::move(run));
  return wanted;
}

bool Fits(const v1::PeerAcquireRequest& request, const v1::PeerAcquireResponse& response) {
  if (response.hit_pages_size() != request.runs_size()) return false;
  size_t pages = 0;
  for (int i = 0; i < response.hit_pages_size(); ++i) {
    if (response.hit_pages(i) > request.runs(i).size() / sizeof(PageKey)) return false;
    pages += response.hit_pages(i);
  }
  return pages == static_cast<size_t>(response.tile_bytes_size()) &&
         (pages == 0 || response.session().size() == sizeof(transport::SessionToken));
}

std::string KeyBytes(const std::vector<PageKey>& keys, const std::vector<size_t>& pages) {
  std::string bytes;
  bytes.reserve(pages.size() * sizeof(PageKey));
  for (const size_t page : pages) bytes += keys[page].view();
  return bytes;
}

MissReason ReasonFromProto(v1::MissReason reason) {
  switch (reason) {
    case v1::MISS_REASON_PENDING:
    case v1::MISS_REASON_DEADLINE:
    case v1::MISS_REASON_CORRUPT:
    case v1::MISS_REASON_GENERATION:
    case v1::MISS_REASON_NOT_COVERED:
    case v1::MISS_REASON_BUSY:
      return static_cast<MissReason>(reason);
    default:
      return MissReason::kAbsent;
  }
}

}  // namespace crumb::server
