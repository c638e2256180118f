// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "client/device/owned.h"
#include "client/page_reader.h"

namespace crumb::client {

// Copies pages from device memory by the copy engine, on a stream of its own. The sums are those
// that came with the pages: crumbd compares them with what arrived.
class DevicePageReader final : public PageReader {
 public:
  // `device` is borrowed.
  static absl::StatusOr<std::unique_ptr<DevicePageReader>> Create(Device& device);

  // By one thread at a time.
  absl::StatusOr<std::vector<std::vector<uint32_t>>> Read(
      std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) override;

 private:
  explicit DevicePageReader(Device& device) : device_(device) {}

  Device& device_;
  OwnedStream stream_;
  OwnedEvent done_;
};

}  // namespace crumb::client
