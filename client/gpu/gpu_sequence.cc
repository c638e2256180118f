// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/gpu_sequence.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "client/gpu/page_scrubber.h"

namespace crumb::client {
namespace {

uint64_t NextId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1);
}

}  // namespace

GpuSequence::GpuSequence(const GpuWorkerParts& shared, const SequenceOptions& begun,
                         SequenceStart start)
    : id(NextId()),
      parts(shared),
      options(begun),
      keyspace(start.keyspace),
      log(shared.starter.rule(), begun, start),
      pages(std::move(start.pages)),
      line(std::make_shared<PublishLimit>()),
      lease_(std::move(start.lease)),
      stats_(std::move(start.stats)) {
  stats_.prompt_tokens = log.prompt();
  for (const std::shared_ptr<const Page>& page : pages) {
    const std::shared_ptr<const PrefixLoad>& load = OnDevice(*page).load;
    if (load == nullptr || (!loads.empty() && loads.back() == load)) continue;
    loads.push_back(load);
  }
}

GpuSequence::GpuSequence(const GpuSequence& origin, int shared_pages)
    : id(NextId()),
      parts(origin.parts),
      options(origin.options),
      keyspace(origin.keyspace),
      log(origin.log),
      pages(origin.pages.begin(), origin.pages.begin() + shared_pages),
      prompt_rows(origin.prompt_rows),
      last(origin.last),
      loads(origin.loads),
      line(std::make_shared<PublishLimit>(origin.line, shared_pages)),
      stats_(origin.stats_) {}

int GpuSequence::pass_tokens_max() const {
  if (!log.InPrompt()) return 1 + parts.options.draft_slots;
  const SegmentRule& rule = parts.starter.rule();
  const int block_end = rule.BlockBegin(log.length()) + rule.prefill_block;
  return std::min(log.prompt(), block_end) - log.length();
}

int GpuSequence::RowsBegin() const {
  const int needed = parts.starter.rule().RowsBegin(log.length(), log.prompt(), log.hit());
  return std::min(needed, stored_pages() * kPageTokens);
}

bool GpuSequence::Publishes(int index) const {
  if (!parts.options.part.publishes || options.publish == Publish::kNone) return false;
  return options.publish == Publish::kAll || index < log.prompt() / kPageTokens;
}

UnsettledPage GpuSequence::AddPage(std::shared_ptr<DevicePage> page) {
  const int index = static_cast<int>(pages.size());
  log.Identify(index, *page);
  page->generation = keyspace->generation;
  pages.push_back(parts.starter.table().Wrap(page));
  stats_.stored_bytes += page->bytes;
  return {.page = std::move(page),
          .wrapped = pages.back(),
          .line = line,
          .keyspace = keyspace,
          .publish = Publishes(index),
          .loads = loads};
}

UnsettledPage GpuSequence::CompleteSink() { return AddPage(std::move(open_sink)); }

int GpuSequence::DamagedLoad(bool wait) {
  int damaged = -1;
  std::erase_if(loads, [&](const std::shared_ptr<const PrefixLoad>& load) {
    if (!wait && !load->done()) return false;
    const int page = load->Settle();
    if (page >= 0 && (damaged < 0 || page < damaged)) damaged = page;
    return page < 0;
  });
  return damaged;
}

int GpuSequence::DamagedPage() {
  if (parts.scrubber == nullptr) return -1;
  const uint64_t damages = parts.scrubber->damages();
  if (damages == damages_seen_) return -1;
  damages_seen_ = damages;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (OnDevice(*pages[i]).damaged.is_set()) return static_cast<int>(i);
  }
  return -1;
}

void GpuSequence::Release() {
  lease_.reset();
  pages.clear();
  open_sink.reset();
  rows.reset();
  sample.reset();
  loads.clear();
}

SequenceStats GpuSequence::stats() const {
  SequenceStats stats = stats_;
  if (finished) return stats;
  const SegmentRule& rule = parts.starter.rule();
  const int length = log.length();
  const int history =
      log.InPrompt() ? rule.PromptHistoryEnd(length, log.hit()) : rule.HistoryEnd(length);
  const size_t row_bytes = size_t{4} * parts.geometry.head_dim * parts.geometry.tiles();
  const int paged =
      std::min({history / kPageTokens, length / kPageTokens, static_cast<int>(pages.size())});
  for (int page = 0; page < paged; ++page) stats.held_bytes += pages[page]->bytes;
  stats.held_bytes += row_bytes * (length - paged * kPageTokens);
  stats.held_bytes_bf16 = row_bytes * length;
  return stats;
}

}  // namespace crumb::client
