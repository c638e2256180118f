// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/connection.h"

namespace crumb::transport {

// Who owns the connections: what requester and responder may ask of it. Of the progress thread.
class ConnectionHost {
 public:
  virtual ~ConnectionHost() = default;

  // Begins to connect. kResourceExhausted: connections_max are there.
  virtual absl::StatusOr<Connection*> Open(const std::string& address) = 0;
  // Null: it is gone.
  virtual Connection* Find(uint64_t connection) = 0;
  // Ends a connection; `connection` is gone afterwards, its link a little later.
  virtual void Break(Connection& connection, const absl::Status& why) = 0;
};

}  // namespace crumb::transport
