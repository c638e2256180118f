// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>
#include <ucp/api/ucp.h>
#include <ucs/type/status.h>

#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/transport_options.h"

namespace crumb::transport {

// Maps UCX's codes to absl::Status. The message consists of `what` and UCX's text.
absl::Status FromUcs(ucs_status_t status, const std::string& what);

// A numeric ADDRESS:PORT, or [ADDRESS]:PORT for IPv6, in the form that sockets use.
struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  std::string ToString() const;
  // kInvalidArgument: `text` does not have this form.
  static absl::StatusOr<SocketAddress> Parse(const std::string& text);
};

// A UCX context with the settings of docs/transport.md: active messages only, no remote memory
// access. Thread-safe. It must outlive its workers.
class UcxContext {
 public:
  // kInvalidArgument: options.listen is not an address of an interface of this machine;
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
