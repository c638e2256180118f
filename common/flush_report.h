// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace crumb {

// The result of a Flush: how many pages of the caller's tenant are durable, and how many of those
// that were committed before it are not, by reason. For a caller of no tenant it counts the pages
// of all tenants. A page counts under one reason. Pages that were deleted or dropped count under
// none.
struct FlushReport {
  uint64_t durable_pages = 0;   // pages on the SSD tier
  uint64_t tier_off_pages = 0;  // in memory; the SSD tier is absent, off or read-only
  uint64_t no_room_pages = 0;   // in memory; the SSD tier did not keep them
  uint64_t lost_pages = 0;      // evicted from memory before they were written
  uint64_t unread_pages = 0;    // not admitted to the SSD (second_hit): in memory, not an error
  uint64_t mark = 0;            // a later Flush that sends it reports the pages lost since
  std::string why;              // the SSD tier's reason for tier_off_pages and no_room_pages
  absl::Status failed;          // not OK: the flush was cut short, and the numbers mean nothing

  // OK if every page that was committed and admitted before the flush is durable. Else a status
  // that names the pages and the reasons: `failed`, kUnavailable (tier off), kResourceExhausted (no
  // room) or kDataLoss (lost).
  absl::Status ToStatus() const;
};

}  // namespace crumb
