// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/gpu/device_page_reader.h"

#include <utility>

#include "common/status_macros.h"

namespace crumb::client {

absl::StatusOr<std::unique_ptr<DevicePageReader>> DevicePageReader::Create(Device& device,
                                                                           ArenaPinner& pinner) {
  std::unique_ptr<DevicePageReader> reader(new DevicePageReader(device, pinner));
  CRUMB_ASSIGN_OR_RETURN(reader->stream_, NewStream(device));
  CRUMB_ASSIGN_OR_RETURN(reader->done_, NewEvent(device));
  return reader;
}

// Pages are published after their pass is done, so that the copies wait for nothing.
absl::StatusOr<std::vector<std::vector<uint32_t>>> DevicePageReader::Read(
    std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) {
  std::vector<std::vector<uint32_t>> sums;
  std::vector<DeviceCopy> copies;
  for (size_t i = 0; i < pages.size(); ++i) {
    copies.push_back({reinterpret_cast<uint64_t>(to[i]),
                      reinterpret_cast<uint64_t>(pages[i]->tiles), pages[i]->bytes});
    sums.push_back(pages[i]->tile_sums);
  }
  const std::shared_ptr<const PinnedArena> arena = pinner_.Use();
  const absl::Status queued = device_.ToHost(arena->CutToHost(copies), stream_.get());
  // Waits even after an error, because some copies to memory of the caller may be in flight.
  CRUMB_RETURN_IF_ERROR(device_.Record(done_.get(), stream_.get()));
  CRUMB_RETURN_IF_ERROR(device_.Synchronize(done_.get()));
  CRUMB_RETURN_IF_ERROR(queued);
  return sums;
}

}  // namespace crumb::client
