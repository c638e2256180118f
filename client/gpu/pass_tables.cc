// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/pass_tables.h"

#include <cstring>

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<PassTables>> PassTables::Create(Device& device, int sequences,
                                                               int pages, int copies) {
  std::unique_ptr<PassTables> tables(new PassTables(device, sequences, pages));
  tables->copies_ = copies;
  CRUMB_ASSIGN_OR_RETURN(tables->memory_, NewDeviceBuffer(device, tables->TableBytes()));
  CRUMB_ASSIGN_OR_RETURN(tables->pages_, NewDeviceBuffer(device, tables->PageBytes()));
  CRUMB_ASSIGN_OR_RETURN(
      tables->staging_,
      NewPinnedBuffer(device, (tables->TableBytes() + tables->PageBytes()) * copies));
  tables->page_copies_.reserve(sequences);
  return tables;
}

void PassTables::Begin(uint64_t pass) {
  pass_ = pass;
  std::memset(Staging(), 0, TableBytes());
  page_copies_.clear();
}

void PassTables::Set(int place, const SequenceRow& what) {
  const auto base = reinterpret_cast<uint64_t>(Staging());
  const int numbers[kColumns] = {
      what.sink_tokens, what.pages,      what.recent_tokens, what.recent_begin, what.fresh_tokens,
      what.fresh_begin, what.sink_after, what.recent_after,  what.begin_after,  0,
      what.bf16_pages,  what.held_head};
  for (int column = 0; column < kColumns; ++column) {
    Numbers(base, static_cast<Column>(column))[place] = numbers[column];
  }
  Addresses(base, 0)[place] = what.sink;
  Addresses(base, 1)[place] = what.ring;
}

// Pages of a sequence never move, so that the row that the device has stays valid.
void PassTables::SetPages(int place, const GpuSequence& sequence, int pages) {
  UploadedRow& row = rows_[place];
  if (row.sequence != sequence.id || row.pages > pages) row = {sequence.id, 0};
  if (row.pages == pages) return;
  auto* staging =
      reinterpret_cast<uint64_t*>(Staging() + TableBytes()) + int64_t{place} * pages_max_;
  for (int page = row.pages; page < pages; ++page) {
    staging[page] = reinterpret_cast<uint64_t>(sequence.pages[page + 1]->tiles);
  }
  const int64_t first = int64_t{place} * pages_max_ + row.pages;
  page_copies_.push_back({pages_.get() + sizeof(uint64_t) * first,
                          reinterpret_cast<uint64_t>(staging + row.pages),
                          sizeof(uint64_t) * (pages - row.pages)});
  row.pages = pages;
}

absl::Status PassTables::Upload(DeviceStream stream) {
  const DeviceCopy tables{memory_.get(), reinterpret_cast<uint64_t>(Staging()), TableBytes()};
  CRUMB_RETURN_IF_ERROR(device_.ToDevice({&tables, 1}, stream));
  if (page_copies_.empty()) return absl::OkStatus();
  return device_.ToDevice(page_copies_, stream);
}

kernels::cuda::DecodeLengths PassTables::lengths() const {
  return {.sink_tokens = OnDevice(kSink),
          .pages = OnDevice(kPages),
          .recent_tokens = OnDevice(kRecent),
          .recent_begin = OnDevice(kBegin),
          .bf16_pages = OnDevice(kBf16Pages)};
}

kernels::cuda::DecodeLengths PassTables::lengths_after(int place) const {
  return {.sink_tokens = OnDevice(kSinkAfter, place),
          .pages = OnDevice(kNoPages, place),
          .recent_tokens = OnDevice(kRecentAfter, place),
          .recent_begin = OnDevice(kBeginAfter, place),
          .bf16_pages = nullptr};
}

kernels::cuda::PrefillLengths PassTables::prefill_lengths() const {
  return {.sink_tokens = OnDevice(kSink),
          .pages = OnDevice(kPages),
          .recent_tokens = OnDevice(kRecent),
          .recent_begin = OnDevice(kBegin),
          .fresh_tokens = OnDevice(kFresh),
          .fresh_begin = OnDevice(kFreshBegin),
          .bf16_pages = OnDevice(kBf16Pages)};
}

}  // namespace crumb::client
