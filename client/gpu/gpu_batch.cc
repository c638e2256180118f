// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/gpu_batch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::client {

using kernels::PageFormat;

absl::StatusOr<std::unique_ptr<GpuBatch>> GpuBatch::Create(const GpuWorkerParts& parts,
                                                           const DeviceBatchOptions& options) {
  std::unique_ptr<GpuBatch> batch(new GpuBatch(parts, options));
  CRUMB_RETURN_IF_ERROR(batch->Allocate());
  return batch;
}

GpuBatch::~GpuBatch() {
  // Waits because the device may still use memory that is about to be freed.
  const uint64_t latest = timeline_ == nullptr ? 0 : timeline_->latest();
  if (latest > 0) timeline_->Synchronize(latest).IgnoreError();
}

absl::Status GpuBatch::Allocate() {
  Device& device = parts_.device;
  if (options_.sequences < 1 || options_.sequences > parts_.results.windows() ||
      options_.tokens < 1 || options_.pages < 1) {
    return absl::InvalidArgumentError("a batch of " + std::to_string(options_.sequences) +
                                      " sequences, " + std::to_string(options_.tokens) +
                                      " tokens, " + std::to_string(options_.pages) + " pages");
  }
  if (!prompt() && (options_.tokens > 1 + parts_.options.draft_slots ||
                    !device.kernels().DecodeSupported(DecodeShape()))) {
    const DeviceGeometry& g = parts_.geometry;
    return absl::InvalidArgumentError(fmt::format(
        "decode attention does not serve {} tokens at once with {} query heads over {} KV heads of "
        "{} channels, groups of {}: take fewer draft slots",
        options_.tokens, g.q_heads, g.kv_heads, g.tile.head_dim, g.tile.group_size));
  }
  CRUMB_ASSIGN_OR_RETURN(
      timeline_, Timeline::Create(device, options_.stream, parts_.device_options.passes_in_flight));
  CRUMB_ASSIGN_OR_RETURN(tables_, PassTables::Create(device, options_.sequences, options_.pages,
                                                     parts_.device_options.passes_in_flight));
  CRUMB_ASSIGN_OR_RETURN(evictor_, WindowEvictor::Create(parts_, timeline_, options_.sequences));
  DeviceKernels& kernels = device.kernels();
  const size_t workspace = prompt() ? 0 : kernels.DecodeWorkspaceBytes(DecodeShape());
  if (!prompt()) {
    CRUMB_ASSIGN_OR_RETURN(plans_, DecodePlans::Create(device, parts_.options, DecodeShape()));
  }
  CRUMB_ASSIGN_OR_RETURN(workspace_, NewDeviceBuffer(device, workspace));
  if (workspace > 0) {
    CRUMB_RETURN_IF_ERROR(device.Clear(workspace_.get(), workspace, options_.stream));
  }
  if (parts_.constants.mean_k_columns(0) != nullptr) {
    const size_t rows = size_t{1} * options_.sequences * options_.tokens * parts_.geometry.q_heads;
    CRUMB_ASSIGN_OR_RETURN(
        offsets_,
        NewDeviceBuffer(device, sizeof(float) * rows * parts_.options.rotations.position_blocks()));
    // The kernel that computes the offsets also keeps queries in captured passes.
    if (!prompt() && parts_.watch != nullptr) {
      CRUMB_ASSIGN_OR_RETURN(held_,
                             NewDeviceBuffer(device, parts_.watch->token_bytes() * options_.tokens *
                                                         parts_.geometry.layers));
    }
  }
  parts_.timelines.Add(timeline_);
  return absl::OkStatus();
}

kernels::cuda::DecodeShape GpuBatch::DecodeShape() const {
  const DeviceGeometry& g = parts_.geometry;
  return {.tile = g.tile,
          .batch = options_.sequences,
          .max_pages = options_.pages,
          .q_tokens = options_.tokens,
          .kv_heads = g.kv_heads,
          .q_heads = g.q_heads,
          .window_tokens_max = kPageTokens + parts_.decode_ring.capacity,
          .batch_invariant = false};
}

kernels::cuda::PrefillShape GpuBatch::PrefillShape() const {
  const DeviceGeometry& g = parts_.geometry;
  return {.tile = g.tile,
          .batch = options_.sequences,
          .max_pages = options_.pages,
          .fresh_max = options_.tokens,
          .kv_heads = g.kv_heads,
          .q_heads = g.q_heads};
}

int GpuBatch::DueEnd(const GpuSequence& sequence) const {
  const SegmentRule& rule = parts_.starter.rule();
  const int length = sequence.length();
  return (sequence.log.InPrompt() ? rule.BlockBegin(length) : rule.HistoryEnd(length + 1)) /
         kPageTokens;
}

absl::Status GpuBatch::CheckOutside(const GpuSequence& sequence) const {
  if (!entries_.empty()) return absl::FailedPreconditionError("a pass is under way");
  if (sequence.finished) return absl::FailedPreconditionError("the sequence was finished");
  if (sequence.fresh > 0) {
    return absl::FailedPreconditionError("the sequence is inside a pass of another batch");
  }
  return absl::OkStatus();
}

absl::StatusOr<GpuSequence*> GpuBatch::OwnSequence(DeviceSequence* sequence) const {
  auto* const own = dynamic_cast<GpuSequence*>(sequence);
  if (own == nullptr || &own->parts != &parts_) {
    return absl::InvalidArgumentError(
        "a sequence of another worker: use a batch of the worker that began it");
  }
  return own;
}

absl::StatusOr<std::vector<GpuSequence*>> GpuBatch::CheckEntries(
    std::span<const PassEntry> entries) const {
  if (entries.empty() || entries.size() > static_cast<size_t>(options_.sequences)) {
    return absl::InvalidArgumentError(std::to_string(entries.size()) + " entries, the batch has " +
                                      std::to_string(options_.sequences) + " places");
  }
  std::vector<GpuSequence*> sequences;
  sequences.reserve(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    CRUMB_ASSIGN_OR_RETURN(GpuSequence* const own, OwnSequence(entries[i].sequence));
    const GpuSequence& sequence = *own;
    sequences.push_back(own);
    CRUMB_RETURN_IF_ERROR(CheckOutside(sequence));
    for (size_t j = 0; j < i; ++j) {
      if (entries[j].sequence == &sequence) {
        return absl::InvalidArgumentError("a sequence is in the pass twice");
      }
    }
    if (sequence.log.InPrompt() != prompt()) {
      return absl::InvalidArgumentError("a sequence of the wrong kind at entry " +
                                        std::to_string(i));
    }
    const int most = std::min(options_.tokens, sequence.pass_tokens_max());
    const int least = prompt() ? 1 : options_.tokens;
    if (entries[i].tokens < least || entries[i].tokens > most) {
      return absl::InvalidArgumentError(
          std::to_string(entries[i].tokens) + " fresh tokens at entry " + std::to_string(i) +
          ": it takes " + std::to_string(least) + " to " + std::to_string(most) + " here");
    }
    if (std::max(DueEnd(sequence), sequence.stored_pages()) - 1 > options_.pages) {
      return absl::InvalidArgumentError("the batch's page table has " +
                                        std::to_string(options_.pages) + " pages for a sequence");
    }
  }
  return sequences;
}

absl::StatusOr<GpuBatch::PassSlots> GpuBatch::TakeSlots(std::span<GpuSequence* const> sequences) {
  int sinks = 0, rings = 0, pages = 0, bf16_pages = 0;
  for (const GpuSequence* const entry : sequences) {
    const GpuSequence& sequence = *entry;
    if (sequence.pages.empty() && sequence.open_sink == nullptr) ++sinks;
    if (NeedsRows(sequence)) ++rings;
    (sequence.history_format() == PageFormat::kBf16 ? bf16_pages : pages) += DueWindows(sequence);
  }
  PassSlots room;
  SlotPool& ring_pool = prompt() ? parts_.prompt_rings : parts_.decode_rings;
  CRUMB_ASSIGN_OR_RETURN(room.sinks, parts_.sinks.Take(sinks, options_.stream));
  CRUMB_ASSIGN_OR_RETURN(room.rings, ring_pool.Take(rings, options_.stream));
  CRUMB_ASSIGN_OR_RETURN(room.pages, parts_.pages.Take(pages, options_.stream));
  CRUMB_ASSIGN_OR_RETURN(room.bf16_pages, parts_.bf16_pages.Take(bf16_pages, options_.stream));
  return room;
}

// Makes the stream wait for passes of other streams that wrote pages of the sequence.
absl::Status GpuBatch::Join(GpuSequence& sequence) {
  const auto wait = [this](const PassRef& moment) -> absl::Status {
    if (moment.timeline == nullptr || moment.timeline == timeline_) return absl::OkStatus();
    return moment.timeline->MakeWait(options_.stream, moment.pass).status();
  };
  CRUMB_RETURN_IF_ERROR(wait(sequence.last));
  if (!std::exchange(sequence.joined, true)) {
    for (const auto& page : sequence.pages) CRUMB_RETURN_IF_ERROR(wait(OnDevice(*page).written));
  }
  if (prompt()) return absl::OkStatus();
  for (const auto& load : sequence.loads) {
    CRUMB_RETURN_IF_ERROR(load->MakeWaitAll(options_.stream));
  }
  return absl::OkStatus();
}

absl::Status GpuBatch::CopyRange(const GpuSequence& from, DeviceAddress to, int begin, int end) {
  const RingShape& source = from.ring();
  const RingShape& target = prompt() ? parts_.prompt_ring : parts_.decode_ring;
  for (int position = begin; position < end;) {
    const int in_source = position % source.capacity, in_target = position % target.capacity;
    const int tokens =
        std::min({end - position, source.capacity - in_source, target.capacity - in_target});
    const DeviceRowsCopy copy{.to = to + target.token_stride * in_target,
                              .to_pitch = static_cast<size_t>(target.head_stride),
                              .from = from.rows->address + source.token_stride * in_source,
                              .from_pitch = static_cast<size_t>(source.head_stride),
                              .row_bytes = static_cast<size_t>(source.token_stride * tokens),
                              .rows = size_t{2} * parts_.geometry.tiles()};
    CRUMB_RETURN_IF_ERROR(parts_.device.CopyRows(copy, options_.stream));
    position += tokens;
  }
  return absl::OkStatus();
}

// Gives the sequence rows of the pass's kind; at the end of a prompt it copies the rows that are
// still needed.
absl::Status GpuBatch::GiveRows(GpuSequence& sequence, std::shared_ptr<const SlotRef> rows) {
  if (sequence.rows != nullptr) {
    CRUMB_RETURN_IF_ERROR(
        CopyRange(sequence, rows->address, sequence.RowsBegin(), sequence.length()));
  }
  sequence.rows = std::move(rows);
  sequence.prompt_rows = prompt();
  return absl::OkStatus();
}

absl::Status GpuBatch::Prepare(std::span<const PassEntry> entries) {
  CRUMB_ASSIGN_OR_RETURN(std::vector<GpuSequence*> sequences, CheckEntries(entries));
  CRUMB_ASSIGN_OR_RETURN(PassSlots room, TakeSlots(sequences));
  std::vector<DueWindow> now, in_pass;
  auto int2_page = room.pages.begin(), bf16_page = room.bf16_pages.begin();
  auto sink = room.sinks.begin();
  for (GpuSequence* const entry : sequences) {
    GpuSequence& sequence = *entry;
    CRUMB_RETURN_IF_ERROR(Join(sequence));
    if (sequence.pages.empty() && sequence.open_sink == nullptr) {
      sequence.open_sink = parts_.geometry.NewPage(PageFormat::kBf16, *sink++);
    }
    // INT2 pages of decode rings are made by the pass's own launch, which may be captured.
    const bool bf16 = sequence.history_format() == PageFormat::kBf16;
    const bool at_once = prompt() || sequence.prompt_rows || bf16;
    for (int due = DueWindows(sequence); due-- > 0;) {
      (at_once ? now : in_pass).push_back({&sequence, *(bf16 ? bf16_page : int2_page)++});
    }
  }
  CRUMB_RETURN_IF_ERROR(evictor_->EvictNow(now));
  CRUMB_ASSIGN_OR_RETURN(pass_, timeline_->BeginPass());
  auto ring = room.rings.begin();
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (NeedsRows(*sequences[i])) CRUMB_RETURN_IF_ERROR(GiveRows(*sequences[i], *ring++));
    sequences[i]->fresh = entries[i].tokens;
  }
  if (parts_.watch != nullptr) TakeSamples(sequences, in_pass);
  if (!prompt()) CRUMB_RETURN_IF_ERROR(evictor_->Prepare(pass_, in_pass));
  entries_ = std::move(sequences);
  return FillTables(pass_);
}

void GpuBatch::TakeSample(GpuSequence& sequence, int page_begin, int page_end) {
  if (sequence.history_format() != PageFormat::kInt2) return;
  for (int page = page_begin; page < page_end && sequence.sample == nullptr; ++page) {
    sequence.sample = parts_.watch->NextSample(page, options_.stream);
  }
}

void GpuBatch::TakeSamples(std::span<GpuSequence* const> sequences,
                           std::span<const DueWindow> in_pass) {
  sample_ = nullptr;
  const SegmentRule& rule = parts_.starter.rule();
  for (GpuSequence* sequence : sequences) {
    if (!prompt()) break;
    const int end = sequence->length() + sequence->fresh;
    const int leaves =
        end == sequence->log.prompt() ? rule.HistoryEnd(end + 1) : rule.BlockBegin(end);
    TakeSample(*sequence, sequence->stored_pages(), leaves / kPageTokens);
  }
  for (const DueWindow& window : in_pass) {
    if (held_.get() == 0 || sample_ != nullptr) break;
    sampled_ = window.sequence;
    TakeSample(*window.sequence, window.sequence->stored_pages(),
               window.sequence->stored_pages() + 1);
    sample_ = window.sequence->sample;
  }
}

// Keeps queries for a window of each prompt that evicts windows next and was selected.
absl::Status GpuBatch::HoldQueries(int layer, const void* q) const {
  const size_t token = size_t{2} * parts_.geometry.q_heads * parts_.geometry.head_dim;
  auto at = reinterpret_cast<DeviceAddress>(q);
  for (const GpuSequence* sequence : entries_) {
    if (sequence->sample != nullptr) {
      CRUMB_RETURN_IF_ERROR(parts_.watch->HoldQueries(*sequence->sample, {timeline_, pass_}, layer,
                                                      at, sequence->fresh));
    }
    at += token * sequence->fresh;
  }
  return absl::OkStatus();
}

PassTables::SequenceRow GpuBatch::RowOf(const GpuSequence& sequence) const {
  const SegmentRule& rule = parts_.starter.rule();
  const int length = sequence.length(), end = length + sequence.fresh;
  const int capacity = sequence.ring().capacity;
  const int history_end =
      prompt() ? rule.PromptHistoryEnd(length, sequence.log.hit()) : rule.HistoryEnd(length + 1);
  // Prefill counts fresh tokens separately, decode as the newest recent ones.
  const int counted = prompt() ? length : end;
  PassTables::SequenceRow place;
  place.sink_tokens = std::min(kPageTokens, counted);
  const bool bf16 = sequence.history_format() == PageFormat::kBf16;
  (bf16 ? place.bf16_pages : place.pages) = history_end / kPageTokens - 1;
  place.recent_tokens = std::max(0, counted - history_end);
  place.recent_begin = history_end % capacity;
  place.fresh_tokens = sequence.fresh;
  place.fresh_begin = fresh_;
  place.sink_after = std::min(kPageTokens, end);
  place.recent_after = std::max(0, end - kPageTokens);
  place.begin_after = kPageTokens % capacity;
  place.sink = sequence.sink_address();
  place.ring = sequence.rows->address;
  if (sample_ != nullptr && &sequence == sampled_) place.held_head = 1 + sample_->head;
  return place;
}

absl::Status GpuBatch::FillTables(uint64_t pass) {
  tables_->Begin(pass);
  fresh_ = 0;
  for (size_t i = 0; i < entries_.size(); ++i) {
    const PassTables::SequenceRow place = RowOf(*entries_[i]);
    tables_->Set(static_cast<int>(i), place);
    tables_->SetPages(static_cast<int>(i), *entries_[i], place.pages + place.bf16_pages);
    fresh_ += entries_[i]->fresh;
  }
  return tables_->Upload(options_.stream);
}

absl::Status GpuBatch::Start() {
  if (prompt()) return absl::OkStatus();
  CRUMB_RETURN_IF_ERROR(evictor_->Launch());
  return plans_.Enqueue(parts_.device, tables_->lengths(), options_.stream);
}

absl::Status GpuBatch::CheckTokens(std::span<const std::span<const int32_t>> tokens) const {
  if (entries_.empty()) return absl::FailedPreconditionError("no pass is under way");
  if (tokens.size() != entries_.size()) {
    return absl::InvalidArgumentError("tokens of " + std::to_string(tokens.size()) +
                                      " sequences, the pass has " +
                                      std::to_string(entries_.size()));
  }
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (static_cast<int>(tokens[i].size()) > entries_[i]->fresh) {
      return absl::InvalidArgumentError(std::to_string(tokens[i].size()) + " tokens accepted of " +
                                        std::to_string(entries_[i]->fresh) + " fresh ones");
    }
    CRUMB_RETURN_IF_ERROR(entries_[i]->log.CheckNext(tokens[i]));
  }
  return absl::OkStatus();
}

// Returns a text that names the entries that attended damaged pages, or an empty one.
std::string GpuBatch::Accept(std::span<const std::span<const int32_t>> tokens, uint64_t pass,
                             std::vector<UnsettledPage>* sinks) {
  std::string damaged;
  for (size_t i = 0; i < tokens.size(); ++i) {
    GpuSequence& sequence = *entries_[i];
    sequence.log.Accept(tokens[i]);
    // An abandoned pass of a prompt ends nothing.
    if (static_cast<int>(tokens[i].size()) < sequence.fresh) sequence.sample.reset();
    sequence.fresh = 0;
    sequence.last = {timeline_, pass};
    int page = sequence.DamagedLoad(!sequence.log.InPrompt());
    if (const int held = sequence.DamagedPage(); held >= 0 && (page < 0 || held < page)) {
      page = held;
    }
    if (page >= 0) {
      // No page computed over them may be published.
      sequence.line->Damage(0);
      sequence.finished = true;
      damaged += "; entry " + std::to_string(i) + " at token " + std::to_string(page * kPageTokens);
    }
    if (sequence.open_sink != nullptr && sequence.length() >= kPageTokens) {
      sinks->push_back(sequence.CompleteSink());
    }
  }
  return damaged;
}

absl::Status GpuBatch::DamagedError(const std::string& where) {
  return absl::DataLossError("cached pages are damaged" + where +
                             ": begin these again with that cached_tokens_max");
}

absl::Status GpuBatch::Advance(std::span<const std::span<const int32_t>> tokens) {
  CRUMB_RETURN_IF_ERROR(CheckTokens(tokens));
  if (!prompt()) CRUMB_RETURN_IF_ERROR(evictor_->Collect());
  if (sample_ != nullptr) {
    CRUMB_RETURN_IF_ERROR(
        parts_.watch->HoldQueriesOfAll(*sample_, {timeline_, pass_}, held_.get(), options_.tokens));
  }
  CRUMB_RETURN_IF_ERROR(timeline_->EndPass());
  parts_.pages.PassEnded();
  parts_.sinks.PassEnded();
  std::vector<UnsettledPage> sinks;
  const std::string damaged = Accept(tokens, pass_, &sinks);
  entries_.clear();
  // A sink settles before the windows of its sequence, the first of which is evicted later.
  for (UnsettledPage& sink : sinks) parts_.settler.SettleSink({timeline_, pass_}, std::move(sink));
  evictor_->Settle(pass_);
  sample_ = nullptr;
  if (damaged.empty()) return absl::OkStatus();
  return DamagedError(damaged);
}

absl::StatusOr<std::unique_ptr<DeviceSequence>> GpuBatch::Fork(DeviceSequence& base) {
  CRUMB_ASSIGN_OR_RETURN(GpuSequence* const own, OwnSequence(&base));
  GpuSequence& origin = *own;
  CRUMB_RETURN_IF_ERROR(CheckOutside(origin));
  if (origin.rows != nullptr && origin.prompt_rows != prompt()) {
    return absl::FailedPreconditionError("fork in a batch of the kind of the last pass");
  }
  PassSlots room;
  SlotPool& ring_pool = prompt() ? parts_.prompt_rings : parts_.decode_rings;
  const bool own_sink = origin.open_sink != nullptr;
  CRUMB_ASSIGN_OR_RETURN(room.rings,
                         ring_pool.Take(origin.rows == nullptr ? 0 : 1, options_.stream));
  CRUMB_ASSIGN_OR_RETURN(room.sinks, parts_.sinks.Take(own_sink ? 1 : 0, options_.stream));
  CRUMB_RETURN_IF_ERROR(Join(origin));
  auto fork = std::make_unique<GpuSequence>(origin, static_cast<int>(origin.pages.size()));
  CRUMB_ASSIGN_OR_RETURN(const uint64_t pass, timeline_->BeginPass());
  if (origin.rows != nullptr) {
    fork->rows = room.rings.front();
    CRUMB_RETURN_IF_ERROR(
        CopyRange(origin, fork->rows->address, origin.RowsBegin(), origin.length()));
  }
  if (own_sink) {
    fork->open_sink = parts_.geometry.NewPage(PageFormat::kBf16, room.sinks.front());
    const DeviceRowsCopy copy{.to = fork->open_sink->address(),
                              .to_pitch = 0,
                              .from = origin.open_sink->address(),
                              .from_pitch = 0,
                              .row_bytes = origin.open_sink->bytes,
                              .rows = 1};
    CRUMB_RETURN_IF_ERROR(parts_.device.CopyRows(copy, options_.stream));
  }
  CRUMB_RETURN_IF_ERROR(timeline_->EndPass());
  origin.last = fork->last = {timeline_, pass};
  fork->joined = origin.joined;
  return std::unique_ptr<DeviceSequence>(std::move(fork));
}

absl::Status GpuBatch::Finish(DeviceSequence& base) {
  CRUMB_ASSIGN_OR_RETURN(GpuSequence* const own, OwnSequence(&base));
  GpuSequence& sequence = *own;
  CRUMB_RETURN_IF_ERROR(CheckOutside(sequence));
  sequence.finished = true;
  if (const int page = sequence.DamagedPage(); page >= 0) {
    sequence.line->Damage(0);
    sequence.Release();
    return DamagedError("; the sequence at token " + std::to_string(page * kPageTokens));
  }
  absl::Status status;
  std::vector<DueWindow> due;
  int end = sequence.rows == nullptr ? 0 : sequence.length() / kPageTokens;
  while (end > sequence.stored_pages() && !sequence.Publishes(end - 1)) --end;
  if (end > sequence.stored_pages()) {
    auto slots = parts_.PagesOf(sequence.history_format())
                     .Take(end - sequence.stored_pages(), options_.stream);
    status = slots.status();
    if (status.ok()) status = Join(sequence);
    if (status.ok()) {
      for (auto& slot : *slots) due.push_back({&sequence, std::move(slot)});
      status = evictor_->EvictNow(due);
    }
  }
  sequence.Release();
  return status;
}

}  // namespace crumb::client
