// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/transfer/stored_pages.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "kernels/quantize.h"

namespace crumb::client {

absl::Status CheckLayers(const WorkerOptions& options, int begin, int end) {
  if (begin >= 0 && begin <= end && end <= options.own_layers()) return absl::OkStatus();
  return absl::OutOfRangeError(
      fmt::format("layers [{}, {}) of a rank that has {}", begin, end, options.own_layers()));
}

void PublishPages(const TransferParts& parts, const KeyspaceBinder::Binding& keyspace,
                  std::vector<std::shared_ptr<Page>> pages, std::span<const uint32_t> status) {
  for (size_t i = 0; i < pages.size(); ++i) {
    parts.tally.windows_evicted.Add();
    if (status[i] & kernels::kStatusSaturated) parts.tally.windows_saturated.Add();
    if (status[i] & kernels::kStatusNonFinite) {
      parts.publisher.NoteRefusedWindow();
    } else if (parts.options.part.publishes) {
      parts.publisher.Publish(keyspace, std::move(pages[i]));
    }
  }
}

void LayersStored::Add(int begin, int end) {
  std::fill(stored_.begin() + begin, stored_.begin() + end, true);
}

absl::Status LayersStored::CheckAll() const {
  if (std::find(stored_.begin(), stored_.end(), false) == stored_.end()) return absl::OkStatus();
  return absl::FailedPreconditionError("pages were finished before every layer was stored");
}

}  // namespace crumb::client
