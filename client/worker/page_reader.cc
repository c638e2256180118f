// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/worker/page_reader.h"

#include <utility>

#include "common/crc32c.h"

namespace crumb::client {

absl::StatusOr<std::vector<std::vector<uint32_t>>> HostPageReader::Read(
    std::span<const std::shared_ptr<const Page>> pages, std::span<std::byte* const> to) {
  std::vector<std::vector<uint32_t>> sums(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    const Page& page = *pages[i];
    for (size_t at = 0; at < page.bytes; at += page.tile_bytes) {
      sums[i].push_back(CopyCrc32c(to[i] + at, {page.tiles + at, page.tile_bytes}));
    }
  }
  return sums;
}

}  // namespace crumb::client
