// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"

namespace crumb::client {

// A call that is in flight. Destroying it before Finish cancels it.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // Returns true if Finish will not block. Does not block.
  virtual bool Ready() = 0;
  // Blocks until the response has arrived or the call has failed. REQUIRES: it is called at most
  // once.
  virtual absl::Status Finish() = 0;
};

}  // namespace crumb::client
