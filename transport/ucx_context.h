// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>
#include <ucp/api/ucp.h>

#include <memory>
#include <span>
#include <string>

#include "absl/status/statusor.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// A numeric ADDRESS:PORT as sockets take it; [ADDRESS]:PORT for IPv6.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string ToString() const;
  // kInvalidArgument: not of this form.
  static absl::StatusOr<SocketAddress> Parse(const std::string& text);
};

// UCX configured as docs/transport.md says: active messages only, no remote memory access.
// Thread-safe; outlives its workers and registrations.
class UcxContext {
 public:
  // kInvalidArgument: options.listen is no address of this machine's interfaces;
  // kFailedPrecondition: UCX has none of options.ucx_tls.
  static absl::StatusOr<std::shared_ptr<UcxContext>> Create(const TransportOptions& options);
  ~UcxContext();
  UcxContext(const UcxContext&) = delete;
  UcxContext& operator=(const UcxContext&) = delete;

  ucp_context_h get() const { return context_; }
  // "ucx 1.13.1, tcp on lo".
  const std::string& description() const { return description_; }

 private:
  UcxContext() = default;

  ucp_context_h context_ = nullptr;
  std::string description_;
};

}  // namespace crumb::transport
