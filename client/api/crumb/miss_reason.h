// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

namespace crumb::client {

// Why a page was not served. Values up to kBusy are those of the wire.
enum class MissReason {
  kNone = 0,          // it was
  kAbsent = 1,        // nobody committed it, or it was evicted
  kPending = 2,       // somebody is committing it
  kDeadline = 3,      // not brought up in time
  kCorrupt = 4,       // header or sums differ: the copy is not used
  kGeneration = 5,    // of a dropped generation of the keyspace
  kQuality = 6,       // the keyspace is served in BF16 only
  kNotCovered = 7,    // not all layers and heads are there
  kBusy = 8,          // no room to bring it up, or the lease budget is spent
  kUnavailable = 64,  // no crumbd, or it did not answer
};

std::string_view MissReasonName(MissReason reason);

}  // namespace crumb::client
