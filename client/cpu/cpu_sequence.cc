// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/cpu/cpu_sequence.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "common/status_macros.h"
#include "kernels/quantize.h"

namespace crumb::client {
namespace {

using kernels::Bf16;
using kernels::PageFormat;

}  // namespace

CpuSequence::CpuSequence(const CpuSequenceParts& parts, const SequenceOptions& options,
                         SequenceStart start)
    : parts_(parts),
      options_(options),
      keyspace_(start.keyspace),
      lease_(std::move(start.lease)),
      log_(parts.rule, options, start),
      pages_(std::move(start.pages)),
      own_(pages_.size()),
      rows_(parts.options.own_layers(), parts.options.own_kv_heads(), parts.options.head_dim),
      layers_(parts.options.own_layers(), LayerState{false, std::max(1, log_.hit() / kPageTokens)}),
      queries_(parts.options.own_layers(), parts.options.own_q_heads() * parts.options.head_dim),
      complete_pages_(log_.hit() / kPageTokens),
      published_pages_(complete_pages_),
      stats_(std::move(start.stats)) {
  stats_.prompt_tokens = log_.prompt();
}

CpuSequence::CpuSequence(const CpuSequence& other, RecentRows rows)
    : parts_(other.parts_),
      options_(other.options_),
      keyspace_(other.keyspace_),
      log_(other.log_),
      pages_(other.pages_.begin(), other.pages_.begin() + other.complete_pages_),
      own_(pages_.size()),
      rows_(std::move(rows)),
      layers_(other.layers_),
      queries_(other.queries_),
      complete_pages_(other.complete_pages_),
      published_pages_(other.published_pages_),
      damaged_page_(other.damaged_page_),
      stats_(other.stats_) {
  // In a pass that was abandoned halfway some layers have stored windows whose pages stay with
  // `other`.
  for (LayerState& layer : layers_) {
    layer.stored_pages = std::min(layer.stored_pages, std::max(1, complete_pages_));
  }
}

absl::StatusOr<std::unique_ptr<Sequence>> CpuSequence::Fork() const {
  if (fresh_ > 0 || finished_) {
    return absl::FailedPreconditionError("Fork inside a pass or after Finish");
  }
  CRUMB_ASSIGN_OR_RETURN(RecentRows rows, rows_.Copy(RowsBegin(), log_.length()));
  auto fork = std::unique_ptr<CpuSequence>(new CpuSequence(*this, std::move(rows)));
  if (complete_pages_ == 0 && log_.length() > 0) {
    // The sink is not full yet, so that each sequence continues to write its own.
    CRUMB_RETURN_IF_ERROR(fork->ReservePages(1));
    std::memcpy(fork->own_[0]->tiles, pages_[0]->tiles, pages_[0]->bytes);
  }
  return std::unique_ptr<Sequence>(std::move(fork));
}

absl::Status CpuSequence::CheckAppend(int layer, int tokens) const {
  if (finished_) return absl::FailedPreconditionError("the sequence was finished");
  if (layer < 0 || layer >= parts_.options.own_layers()) {
    return absl::InvalidArgumentError("layer " + std::to_string(layer) + " of " +
                                      std::to_string(parts_.options.own_layers()));
  }
  const int room = InPrompt() ? log_.prompt() - log_.length() : 1 + parts_.options.draft_slots;
  if (tokens < 1 || tokens > room) {
    return absl::InvalidArgumentError(std::to_string(tokens) + " fresh tokens at position " +
                                      std::to_string(log_.length()) + ": a pass takes 1 to " +
                                      std::to_string(room) + " here");
  }
  if (fresh_ > 0 && tokens != fresh_) {
    return absl::InvalidArgumentError("the pass has " + std::to_string(fresh_) +
                                      " fresh tokens, layer " + std::to_string(layer) + " got " +
                                      std::to_string(tokens));
  }
  if (layers_[layer].appended) {
    return absl::FailedPreconditionError("layer " + std::to_string(layer) +
                                         " has its rows already: Advance ends a pass");
  }
  return absl::OkStatus();
}

// In the prompt the ring gets room up to the end of the prefill block at once; afterwards it has
// room for a full window and the drafts.
absl::Status CpuSequence::ResizeRows(int tokens) {
  const int begin = RowsBegin();
  const int end = log_.length() + tokens;
  if (!InPrompt()) {
    const int window = parts_.options.recent_tokens + kPageTokens + parts_.options.draft_slots;
    return rows_.Resize(window, begin, log_.length());
  }
  if (end - begin <= rows_.capacity()) return absl::OkStatus();
  const int block_end = parts_.rule.BlockBegin(log_.length()) + parts_.rule.prefill_block;
  const int wanted = std::max(end, std::min(log_.prompt(), block_end)) - begin;
  return rows_.Resize(std::max(wanted, kPageTokens), begin, log_.length());
}

// Returns the first position whose row will still be attended or stored.
int CpuSequence::RowsBegin() const {
  int stored = layers_.front().stored_pages;
  for (const LayerState& layer : layers_) stored = std::min(stored, layer.stored_pages);
  return std::min(parts_.rule.RowsBegin(log_.length(), log_.prompt(), log_.hit()),
                  stored * kPageTokens);
}

absl::Status CpuSequence::BeginPass(int tokens) {
  const int stored_end = InPrompt() ? parts_.rule.BlockBegin(log_.length() + tokens)
                                    : parts_.rule.HistoryEnd(log_.length() + 1);
  CRUMB_RETURN_IF_ERROR(ReservePages(std::max(1, stored_end / kPageTokens)));
  // Stores windows for which there was no memory when they were due, before the ring shrinks.
  if (!InPrompt()) {
    StoreLayers(0, parts_.options.own_layers(),
                parts_.rule.HistoryEnd(log_.length()) / kPageTokens);
  }
  CRUMB_RETURN_IF_ERROR(ResizeRows(tokens));
  fresh_ = tokens;
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Page>> CpuSequence::NewPage(int index) const {
  auto page = std::make_shared<Page>();
  page->format = index == 0 ? PageFormat::kBf16 : keyspace_->history_format;
  page->tile_bytes = parts_.options.tile_shape().bytes(page->format);
  page->layer_stride = page->tile_bytes * parts_.options.own_kv_heads();
  page->bytes = page->layer_stride * parts_.options.own_layers();
  CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<std::byte> memory, parts_.pool.Allocate(page->bytes));
  page->tiles = memory.get();
  page->memory = std::move(memory);
  return page;
}

absl::Status CpuSequence::ReservePages(int page_end) {
  while (static_cast<int>(pages_.size()) < page_end) {
    CRUMB_ASSIGN_OR_RETURN(std::shared_ptr<Page> page, NewPage(static_cast<int>(pages_.size())));
    pages_.push_back(page);
    own_.push_back(std::move(page));
  }
  return absl::OkStatus();
}

absl::Status CpuSequence::Append(int layer, int tokens, const Bf16* k, const Bf16* v) {
  CRUMB_RETURN_IF_ERROR(CheckAppend(layer, tokens));
  if (fresh_ == 0) CRUMB_RETURN_IF_ERROR(BeginPass(tokens));
  layers_[layer].appended = true;
  // After the prompt, the oldest window is stored before the attention of the step that fills the
  // ring. Only the step's first token counts, because drafts behind it may be rejected.
  if (!InPrompt()) {
    StoreLayers(layer, layer + 1, parts_.rule.HistoryEnd(log_.length() + 1) / kPageTokens);
  }
  const int in_sink = std::clamp(kPageTokens - log_.length(), 0, tokens);
  if (in_sink > 0) WriteSink(layer, in_sink, k, v);
  const int64_t skip = int64_t{in_sink} * parts_.options.own_kv_heads() * parts_.options.head_dim;
  rows_.Write(layer, log_.length() + in_sink, tokens - in_sink, k + skip, v + skip);
  // Tokens behind a block's end attend the block in its stored format, even in this pass.
  if (InPrompt()) {
    StoreLayers(layer, layer + 1, parts_.rule.BlockBegin(log_.length() + tokens) / kPageTokens);
  }
  return absl::OkStatus();
}

void CpuSequence::WriteSink(int layer, int tokens, const Bf16* k, const Bf16* v) {
  const Page& sink = *pages_[0];
  const int64_t dim = parts_.options.head_dim;
  const int heads = parts_.options.own_kv_heads();
  for (int head = 0; head < heads; ++head) {
    Bf16* tile_k = reinterpret_cast<Bf16*>(sink.layer(layer) + sink.tile_bytes * head);
    Bf16* tile_v = tile_k + kPageTokens * dim;
    for (int t = 0; t < tokens; ++t) {
      const int64_t from = (int64_t{t} * heads + head) * dim;
      const int64_t to = (log_.length() + t) * dim;
      std::memcpy(tile_k + to, k + from, dim * sizeof(Bf16));
      std::memcpy(tile_v + to, v + from, dim * sizeof(Bf16));
    }
  }
}

void CpuSequence::StoreLayers(int layer_begin, int layer_end, int page_end) {
  int first = page_end;
  for (int layer = layer_begin; layer < layer_end; ++layer) {
    first = std::min(first, layers_[layer].stored_pages);
  }
  for (int page = first; page < page_end; ++page) {
    // Layers may differ by an abandoned pass; storing a window again gives the same bytes.
    const uint32_t status =
        parts_.backend.StoreWindow(rows_, page * kPageTokens, layer_begin, layer_end, *own_[page]);
    if ((status & kernels::kStatusNonFinite) != 0) own_[page]->finite = false;
    if ((status & kernels::kStatusSaturated) != 0) parts_.tally.windows_saturated.Add();
    MeasureStored(page, layer_begin, layer_end);
  }
  for (int layer = layer_begin; layer < layer_end; ++layer) {
    layers_[layer].stored_pages = std::max(layers_[layer].stored_pages, page_end);
  }
}

// Measures the window against its exact rows while both exist. Its layers come in order. A window
// without queries, as in a prompt's first pass, is not recorded.
void CpuSequence::MeasureStored(int page, int layer_begin, int layer_end) {
  if (page == 0 || keyspace_->history_format != PageFormat::kInt2 || !queries_.Has(layer_begin)) {
    return;
  }
  if (layer_begin == 0) {
    const std::optional<int> head = parts_.watch.NextSample();
    if (head.has_value()) measured_[page] = {.head = *head, .layers = {}};
  }
  const auto found = measured_.find(page);
  if (found == measured_.end()) return;
  WindowMeasurement& window = found->second;
  const WorkerOptions& options = parts_.options;
  const int group = options.own_q_heads() / options.own_kv_heads();
  for (int layer = layer_begin; layer < layer_end; ++layer) {
    const bool next = static_cast<int>(window.layers.size()) == layer;
    if (!next || !own_[page]->finite || !queries_.Has(layer)) {
      measured_.erase(found);
      return;
    }
    const std::vector<float> queries =
        queries_.Take(layer, window.head * group, (window.head + 1) * group, options.head_dim);
    window.layers.push_back(parts_.backend.Measure(rows_, page * kPageTokens, layer, window.head,
                                                   *own_[page], queries));
  }
  if (layer_end < options.own_layers()) return;
  parts_.publisher.NoteQuality(window.layers);
  parts_.watch.Record(window.layers);
  measured_.erase(found);
}

absl::Status CpuSequence::Attend(int layer, int tokens, const Bf16* q, float* out) {
  if (layer < 0 || layer >= parts_.options.own_layers() || tokens != fresh_ || fresh_ == 0 ||
      !layers_[layer].appended) {
    return absl::FailedPreconditionError("Attend of " + std::to_string(tokens) +
                                         " tokens of layer " + std::to_string(layer) +
                                         " without their Append");
  }
  if (parts_.watch.enabled()) queries_.Hold(layer, tokens, q);
  const Page& sink = *pages_[0];
  AttentionCall call;
  call.layer = layer;
  call.history_format = keyspace_->history_format;
  call.sink.k = reinterpret_cast<const Bf16*>(sink.layer(layer));
  call.sink.token_stride = parts_.options.head_dim;
  call.sink.v = call.sink.k + kPageTokens * call.sink.token_stride;
  call.sink.head_stride = static_cast<int64_t>(sink.tile_bytes / sizeof(Bf16));
  call.recent = {.k = rows_.k(layer),
                 .v = rows_.v(layer),
                 .head_stride = rows_.head_stride(),
                 .token_stride = rows_.token_stride()};
  call.recent_capacity = rows_.capacity();
  const int64_t token_elements = int64_t{parts_.options.own_q_heads()} * parts_.options.head_dim;
  // Tokens of a prompt attend the history before their own prefill block, so that the tokens of
  // each block are attended by a call of their own.
  for (int first = 0, last = 0; first < tokens; first = last) {
    const int position = log_.length() + first;
    const int block_end = parts_.rule.BlockBegin(position) + parts_.rule.prefill_block;
    last = InPrompt() ? std::min(tokens, block_end - log_.length()) : tokens;
    const int history_end = InPrompt() ? parts_.rule.PromptHistoryEnd(position, log_.hit())
                                       : parts_.rule.HistoryEnd(log_.length() + 1);
    const int end = log_.length() + last;
    addresses_.clear();
    for (int page = 1; page < history_end / kPageTokens; ++page) {
      addresses_.push_back(reinterpret_cast<uint64_t>(pages_[page]->layer(layer)));
    }
    call.q_tokens = last - first;
    call.q = q + first * token_elements;
    call.out = out + first * token_elements;
    call.sink_tokens = std::min(kPageTokens, end);
    call.pages = addresses_;
    call.recent_begin = rows_.capacity() == 0 ? 0 : rows_.slot(history_end);
    call.recent_tokens = std::max(0, end - history_end);
    CRUMB_RETURN_IF_ERROR(parts_.backend.Attend(call));
  }
  return absl::OkStatus();
}

absl::Status CpuSequence::CheckAdvance(std::span<const int32_t> tokens) const {
  if (finished_) return absl::FailedPreconditionError("the sequence was finished");
  if (static_cast<int>(tokens.size()) > fresh_) {
    return absl::InvalidArgumentError(std::to_string(tokens.size()) + " tokens accepted of " +
                                      std::to_string(fresh_) + " fresh ones");
  }
  if (tokens.empty()) return absl::OkStatus();
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (!layers_[layer].appended) {
      return absl::FailedPreconditionError("layer " + std::to_string(layer) +
                                           " has no rows of this pass");
    }
  }
  return log_.CheckNext(tokens);
}

absl::Status CpuSequence::Advance(std::span<const int32_t> tokens) {
  CRUMB_RETURN_IF_ERROR(CheckAdvance(tokens));
  DropFresh(tokens);
  const int page_end = InPrompt() ? 0 : parts_.rule.HistoryEnd(log_.length()) / kPageTokens;
  return CompletePages(page_end);
}

// Ends the pass with the accepted tokens. Pages stored behind them are invalid.
void CpuSequence::DropFresh(std::span<const int32_t> accepted) {
  const bool all = static_cast<int>(accepted.size()) == fresh_;
  log_.Accept(accepted);
  fresh_ = 0;
  measured_.clear();
  const int full = std::max(1, log_.length() / kPageTokens);
  for (LayerState& layer : layers_) {
    layer.appended = false;
    layer.stored_pages = std::min(layer.stored_pages, full);
  }
  if (all) return;
  for (size_t page = full; page < own_.size(); ++page) own_[page]->finite = true;
}

absl::Status CpuSequence::CompletePages(int page_end) {
  // A page for which there is no memory now is stored by a later call; its rows stay until then.
  absl::Status reserved = ReservePages(page_end);
  StoreLayers(0, parts_.options.own_layers(), std::min(page_end, static_cast<int>(pages_.size())));
  int stored = layers_.front().stored_pages;
  for (const LayerState& layer : layers_) stored = std::min(stored, layer.stored_pages);
  const int complete = std::min(stored, log_.length() / kPageTokens);
  for (; complete_pages_ < complete; ++complete_pages_) {
    const int index = complete_pages_;
    std::shared_ptr<Page> page = std::move(own_[index]);
    log_.Identify(index, *page);
    page->generation = keyspace_->generation;
    if (index == 0) {
      page->finite =
          AllFinite(reinterpret_cast<const Bf16*>(page->tiles), page->bytes / sizeof(Bf16));
    }
    parts_.tally.windows_evicted.Add();
    stats_.stored_bytes += page->bytes;
    if (!page->finite) {
      parts_.publisher.NoteRefusedWindow();
      damaged_page_ = std::min(damaged_page_, index);
    }
    pages_[index] = index >= damaged_page_ ? std::move(page) : parts_.table.Share(std::move(page));
  }
  if (!Publishes()) return reserved;
  int published = std::min(complete_pages_, damaged_page_);
  if (options_.publish == Publish::kPrompt) {
    published = std::min(published, log_.prompt() / kPageTokens);
  }
  for (; published_pages_ < published; ++published_pages_) {
    parts_.publisher.Publish(keyspace_, pages_[published_pages_]);
  }
  return reserved;
}

absl::Status CpuSequence::Finish() {
  if (finished_) return absl::FailedPreconditionError("the sequence was finished");
  DropFresh({});
  const int page_end = Publishes() ? log_.length() / kPageTokens : 0;
  absl::Status status = CompletePages(page_end);
  finished_ = true;
  lease_.reset();
  pages_.clear();
  own_.clear();
  rows_ = RecentRows(parts_.options.own_layers(), parts_.options.own_kv_heads(),
                     parts_.options.head_dim);
  return status;
}

int CpuSequence::HistoryEndNow() const {
  return InPrompt() ? parts_.rule.PromptHistoryEnd(log_.length(), log_.hit())
                    : parts_.rule.HistoryEnd(log_.length());
}

SequenceStats CpuSequence::stats() const {
  SequenceStats stats = stats_;
  if (finished_) return stats;
  const size_t row_bytes = rows_.bytes_per_token();
  const int paged = std::min(HistoryEndNow(), log_.length() / kPageTokens * kPageTokens);
  for (int page = 0; page < paged / kPageTokens; ++page) stats.held_bytes += pages_[page]->bytes;
  stats.held_bytes += row_bytes * (log_.length() - paged);
  stats.held_bytes_bf16 = row_bytes * log_.length();
  return stats;
}

}  // namespace crumb::client
