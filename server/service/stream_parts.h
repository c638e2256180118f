// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "server/service/call_scope.h"
#include "server/service/stall_watch.h"

namespace crumb::server {

// The parts of the service that a Put or Get works with; they outlive the stream.
struct StreamParts {
  CallsInProgress& calls;
  StallWatch& stalls;
};

}  // namespace crumb::server
