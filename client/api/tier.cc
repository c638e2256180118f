// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/tier.h"

namespace crumb::client {

std::string_view TierName(Tier tier) {
  switch (tier) {
    case Tier::kUnknown:
      return "unknown";
    case Tier::kDevice:
      return "device";
    case Tier::kHost:
      return "host";
    case Tier::kSsd:
      return "ssd";
    case Tier::kRemote:
      return "remote";
  }
  return "unknown";
}

}  // namespace crumb::client
