// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "common/fragment_header.h"
#include "common/fragment_header_view.h"
#include "crumb/device_fragment.h"

namespace crumb::client {

// One fragment in crumbd's shared memory. Its header was decoded and compared with what was asked
// for; its tiles were not read yet.
struct LeasedFragment {
  int page = 0;           // index into the keys of the Acquire
  FragmentHeader header;  // without tile sums
  // Valid while the lease lives, layer by layer, head by head:
  std::span<const uint32_t> tile_sums;
  std::span<const std::byte> tiles;

  // kDataLoss naming the first tile whose checksum differs. Reads every byte.
  absl::Status VerifyTiles() const { return VerifyTileSums(header, tile_sums, tiles); }
};

// Pages that stay where they are until this is destroyed. Outlives the connection it came over:
// when crumbd dies the memory stays mapped. Thread-safe once made. Must not outlive its Client.
class Lease {
 public:
  // `hold` keeps the memory mapped and ends the lease when its last reference goes; `told` keeps
  // what device fragments point to; `epoch` is that of the crumbd that gave the lease.
  Lease(std::vector<LeasedFragment> fragments, std::shared_ptr<void> hold)
      : Lease(std::move(fragments), {}, nullptr, 0, std::move(hold)) {}
  Lease(std::vector<LeasedFragment> fragments, std::vector<DeviceFragment> device_fragments,
        std::shared_ptr<const void> told, uint64_t epoch, std::shared_ptr<void> hold)
      : fragments_(std::move(fragments)),
        device_fragments_(std::move(device_fragments)),
        told_(std::move(told)),
        epoch_(epoch),
        hold_(std::move(hold)) {}
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // In host memory; by page, ascending.
  std::span<const LeasedFragment> fragments() const { return fragments_; }
  // In device pools that the Acquire named; by page, ascending.
  std::span<const DeviceFragment> device_fragments() const { return device_fragments_; }
  // Keeps what they point to when the lease has ended, too.
  const std::shared_ptr<const void>& told() const { return told_; }
  // Of the crumbd that gave it: the next one knows of no slot that only this lease holds.
  uint64_t epoch() const { return epoch_; }

 private:
  std::vector<LeasedFragment> fragments_;
  std::vector<DeviceFragment> device_fragments_;
  std::shared_ptr<const void> told_;
  uint64_t epoch_ = 0;
  std::shared_ptr<void> hold_;
};

}  // namespace crumb::client
