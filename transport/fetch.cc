// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "transport/fetch.h"

namespace crumb::transport {

const char* PageStatusName(PageStatus status) {
  static constexpr std::array<const char*, kPageStatusCount> kNames = {
      "hit",  "absent",  "not_covered", "stale",     "refused",
      "busy", "corrupt", "deadline",    "cancelled", "unavailable"};
  const auto index = static_cast<size_t>(status);
  return index < kNames.size() ? kNames[index] : "unknown";
}

}  // namespace crumb::transport
