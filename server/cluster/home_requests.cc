// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/home_questions.h"

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
    // Without the name of a run that begins before the request its homes cannot be asked for it.
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

std::vector<HomeQuestion> QuestionsFor(const PullContext& context, const std::vector<PageKey>& runs,
                                       bool everyone) {
  std::vector<HomeQuestion> questions;
  std::map<std::string, size_t> by_node;
  const PeerTable::Peers all = everyone ? context.peers.All() : PeerTable::Peers();
  for (size_t index = 0; index < runs.size(); ++index) {
    for (const auto& peer : everyone ? all : context.peers.HomesToAsk(runs[index])) {
      const auto [entry, is_new] = by_node.try_emplace(peer->id(), questions.size());
      if (is_new) {
        // A node whose breaker is open stays listed without runs, so that it is skipped for all.
        const bool allowed = peer->breaker().Allow();
        if (!allowed) context.metrics.breaker_skips.Add();
        questions.push_back({allowed ? peer : nullptr, {}});
      }
      HomeQuestion& question = questions[entry->second];
      if (question.peer != nullptr) question.runs.push_back(index);
    }
  }
  std::erase_if(questions, [](const HomeQuestion& question) { return question.peer == nullptr; });
  return questions;
}

std::optional<HolderDirectory::Referral> OwnReferral(const PullContext& context,
                                                     const PullRequest& request, const PageKey& run,
                                                     const std::vector<size_t>& pages,
                                                     bool counted) {
  if (context.holders == nullptr || request.everyone || !context.peers.IsHome(run)) {
    return std::nullopt;
  }
  std::vector<PageKey> keys;
  for (const size_t page : pages) keys.push_back(request.keys[page]);
  HolderDirectory::Question question;
  question.keyspace = request.keyspace->id;
  question.generation = request.keyspace->generation.load();
  question.range = request.range;
  question.keys = keys;
  question.counted = counted;
  return context.holders->Refer(question);
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

bool Fits(const v1::PeerAcquireRequest& question, const v1::PeerAcquireResponse& answer) {
  if (answer.hit_pages_size() != question.runs_size()) return false;
  size_t pages = 0;
  for (int i = 0; i < answer.hit_pages_size(); ++i) {
    if (answer.hit_pages(i) > question.runs(i).size() / sizeof(PageKey)) return false;
    pages += answer.hit_pages(i);
  }
  return pages == static_cast<size_t>(answer.tile_bytes_size()) &&
         (pages == 0 || answer.session().size() == sizeof(transport::SessionToken));
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
