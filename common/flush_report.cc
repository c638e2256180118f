// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/flush_report.h"

namespace crumb {

absl::Status FlushReport::ToStatus() const {
  if (!failed.ok()) return failed;
  const uint64_t missing = tier_off_pages + no_room_pages + lost_pages;
  if (missing == 0) return absl::OkStatus();
  std::string text = std::to_string(missing) + " committed pages are not durable:";
  const char* separator = " ";
  const auto add = [&](uint64_t pages, const std::string& reason) {
    if (pages == 0) return;
    text += separator + std::to_string(pages) + " " + reason;
    separator = "; ";
  };
  const std::string detail = why.empty() ? "" : " (" + why + ")";
  add(tier_off_pages, "are in memory only because the SSD tier takes no writes" + detail);
  add(no_room_pages, "are in memory only because the SSD tier has no room for them" + detail);
  add(lost_pages, "left memory before they were written to the SSD tier");
  if (tier_off_pages > 0) return absl::UnavailableError(text);
  if (no_room_pages > 0) return absl::ResourceExhaustedError(text);
  return absl::DataLossError(text);
}

}  // namespace crumb
