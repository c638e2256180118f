// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"

namespace crumb::client {

// A call that is in flight. Destroying it before Finish cancels it.
//
// It is the common form of a call over gRPC (RpcStub) and over a session's socket (CallSocket).
// Used by one thread at a time.
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
