// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "common/wire_enums.h"

namespace crumb {

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

std::string_view MissReasonName(MissReason reason) {
  switch (reason) {
    case MissReason::kNone:
      return "none";
    case MissReason::kAbsent:
      return "absent";
    case MissReason::kPending:
      return "pending";
    case MissReason::kDeadline:
      return "deadline";
    case MissReason::kCorrupt:
      return "corrupt";
    case MissReason::kGeneration:
      return "generation";
    case MissReason::kQuality:
      return "quality";
    case MissReason::kNotCovered:
      return "not_covered";
    case MissReason::kBusy:
      return "busy";
    case MissReason::kUnavailable:
      return "unavailable";
  }
  return "unknown";
}

}  // namespace crumb
