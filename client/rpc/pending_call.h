// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "absl/status/status.h"

namespace crumb::client {

// A call that is under way. Destroyed before it was finished it is cancelled.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  // Whether Finish will not block. Does not block.
  virtual bool Ready() = 0;
  // Blocks until the answer is there or the call has failed. Once.
  virtual absl::Status Finish() = 0;
};

}  // namespace crumb::client
