// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/cluster_metrics.h"

namespace crumb::server {

const char* PushDropName(PushDrop reason) {
  switch (reason) {
    case PushDrop::kQueueFull:
      return "queue_full";
    case PushDrop::kAlone:
      return "alone";
    case PushDrop::kUnplaced:
      return "unplaced";
    case PushDrop::kUnread:
      return "unread";
    case PushDrop::kNodeGone:
      return "node_gone";
    case PushDrop::kBreaker:
      return "breaker";
    case PushDrop::kSilent:
      return "silent";
    case PushDrop::kRefused:
      return "refused";
    case PushDrop::kBusy:
      return "busy";
    case PushDrop::kLate:
      return "deadline";
    case PushDrop::kAbsent:
      return "absent";
    case PushDrop::kCorrupt:
      return "corrupt";
    case PushDrop::kGeneration:
      return "generation";
    case PushDrop::kStopped:
      return "stopped";
  }
  return "refused";
}

}  // namespace crumb::server
