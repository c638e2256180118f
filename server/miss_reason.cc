// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/miss_reason.h"

namespace crumb::server {

v1::MissReason ToProto(storage::MissReason reason) {
  switch (reason) {
    case storage::MissReason::kNone:
      return v1::MISS_REASON_UNSPECIFIED;
    case storage::MissReason::kAbsent:
      return v1::MISS_REASON_ABSENT;
    case storage::MissReason::kPending:
      return v1::MISS_REASON_PENDING;
    case storage::MissReason::kDeadline:
      return v1::MISS_REASON_DEADLINE;
    case storage::MissReason::kCorrupt:
      return v1::MISS_REASON_CORRUPT;
    case storage::MissReason::kGeneration:
      return v1::MISS_REASON_GENERATION;
    case storage::MissReason::kNotCovered:
      return v1::MISS_REASON_NOT_COVERED;
    case storage::MissReason::kBusy:
      return v1::MISS_REASON_BUSY;
  }
  return v1::MISS_REASON_ABSENT;
}

}  // namespace crumb::server
