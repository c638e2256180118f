// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/gpu/device/arena_pinner.h"
#include "client/gpu/device/owned.h"
#include "client/worker/page_reader.h"

namespace crumb::client {

// DevicePageReader copies pages from device memory to the host with the copy engine, on a stream of
// its own. It returns the checksums that the pages were made with, so that crumbd detects errors of
// the copy.
class DevicePageReader final : public PageReader {
 public:
  // Both are borrowed.
  static absl::StatusOr<std::unique_ptr<DevicePageReader>> Create(Device& device,
                                                                  ArenaPinner& pinner);

  // Called by one thread at a time.
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) override;

 private:
  DevicePageReader(Device& device, ArenaPinner& pinner) : device_(device), pinner_(pinner) {}

  Device& device_;
  ArenaPinner& pinner_;
  OwnedStream stream_;
  OwnedEvent done_;
};

}  // namespace crumb::client
