// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "crumb/miss_reason.h"

namespace crumb::client {

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

}  // namespace crumb::client
