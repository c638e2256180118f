// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/device/owned.h"
#include "client/gpu/gpu_sequence.h"
#include "kernels/cuda/decode/decode_call.h"
#include "kernels/cuda/prefill/prefill_call.h"

namespace crumb::client {

// PassTables holds the tables in which the kernels of a batch's passes find their sequences:
// lengths, addresses of sinks and rings, and the page table. They are filled on the host, in one
// pinned copy for each pass that may be queued. Not thread-safe.
//
// Device addresses of the tables never change, so that a captured graph reads the next pass's
// contents. Rows of the page table are uploaded only as far as they differ from those that the
// device has.
class PassTables {
 public:
  static absl::StatusOr<std::unique_ptr<PassTables>> Create(Device& device, int sequences,
                                                            int pages, int copies);

  // One row of the next pass's tables; all zeros for padding.
  struct SequenceRow {
    int sink_tokens = 0;
    int pages = 0;       // INT2 pages
    int bf16_pages = 0;  // BF16 pages behind them
    int recent_tokens = 0;
    int recent_begin = 0;
    int fresh_tokens = 0;
    int fresh_begin = 0;
    int held_head = 0;  // 1 + the KV head whose queries the pass keeps; 0: none
    // Lengths including the fresh rows; Append writes these at the ends.
    int sink_after = 0;
    int recent_after = 0;
    int begin_after = 0;
    DeviceAddress sink = 0;
    DeviceAddress ring = 0;
  };

  // Starts the tables of pass `pass` in the copy of an earlier one.
  void Begin(uint64_t pass);
  // Sets row `place` of the tables of the pass.
  void Set(int place, const SequenceRow& what);
  // Sets row `place` of the page table to the sequence's first `pages` history pages.
  void SetPages(int place, const GpuSequence& sequence, int pages);
  // Enqueues the copies to the device.
  absl::Status Upload(DeviceStream stream);

  // Device addresses, which are the same for every pass, starting with row `place`.
  kernels::cuda::DecodeLengths lengths() const;
  kernels::cuda::DecodeLengths lengths_after(int place) const;
  kernels::cuda::PrefillLengths prefill_lengths() const;
  const int32_t* held_heads() const { return OnDevice(kHeldHead); }
  const uint64_t* sinks(int place) const { return Addresses(memory_.get(), 0) + place; }
  const uint64_t* rings(int place) const { return Addresses(memory_.get(), 1) + place; }
  const uint64_t* page_table() const { return reinterpret_cast<const uint64_t*>(pages_.get()); }

 private:
  enum Column {
    kSink,
    kPages,
    kRecent,
    kBegin,
    kFresh,
    kFreshBegin,
    kSinkAfter,
    kRecentAfter,
    kBeginAfter,
    kNoPages,
    kBf16Pages,
    kHeldHead,
    kColumns
  };
  // The part of a row of the page table that the device has.
  struct UploadedRow {
    uint64_t sequence = 0;
    int pages = 0;
  };

  PassTables(Device& device, int sequences, int pages)
      : device_(device), sequences_(sequences), pages_max_(pages), rows_(sequences) {}
  size_t TableBytes() const {
    return size_t{1} * sequences_ * (2 * sizeof(uint64_t) + kColumns * sizeof(int32_t));
  }
  size_t PageBytes() const { return sizeof(uint64_t) * sequences_ * pages_max_; }
  // Returns the pinned copy of the pass, and the arrays of tables at `base`.
  std::byte* Staging() const {
    return staging_.get() + (TableBytes() + PageBytes()) * (pass_ % copies_);
  }
  uint64_t* Addresses(uint64_t base, int which) const {
    return reinterpret_cast<uint64_t*>(base) + which * sequences_;
  }
  int32_t* Numbers(uint64_t base, Column column) const {
    return reinterpret_cast<int32_t*>(base + 2 * sizeof(uint64_t) * sequences_) +
           column * sequences_;
  }
  const int32_t* OnDevice(Column column, int place = 0) const {
    return Numbers(memory_.get(), column) + place;
  }

  Device& device_;
  const int sequences_;
  const int pages_max_;
  int copies_ = 1;
  DeviceBuffer memory_;
  DeviceBuffer pages_;
  PinnedBuffer staging_;  // [copies] of the tables, then of the page table
  uint64_t pass_ = 0;
  std::vector<UploadedRow> rows_;
  std::vector<DeviceCopy> page_copies_;
};

}  // namespace crumb::client
