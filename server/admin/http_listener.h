// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/unique_fd.h"

namespace crumb::server {

// The connections of an HTTP server for small requests: one thread, crumb-admin, moves the
// bytes of all of them without waiting for any, so a caller who sends or reads slowly holds up no
// other. The life of a connection:
//
//   reading --head complete--> handling --response made--> writing --written--> lingering -->
//   closed
//
// Requests are handled on the threads of a pool. Each connection carries one request. The body of a
// request is not read; bytes behind the head are discarded while the connection lingers, until the
// caller closes, so that the kernel does not reset the connection before the caller has read its
// response.
//
// Bounds: connections in total; kHeadBytesMax of a head; `timeout` from accepting to the complete
// head, however often bytes arrive, and again from the response to the end. When all places are
// taken the remote address with the most connections in state reading loses its oldest one, once it
// is kGrace old (Handshakes); until then new connections wait in the backlog.
class HttpListener {
 public:
  static constexpr size_t kHeadBytesMax = 16 << 10;
  static constexpr Duration kGrace = std::chrono::milliseconds(100);

  struct Options {
    int threads = 2;
    size_t connections_max = 64;
    Duration timeout = std::chrono::seconds(5);
  };
  // Turns a head, as it came, into a whole response. Called on several threads.
  using Handler = std::function<std::string(const std::string& head)>;

  // Serves from now on at listening sockets that do not block. `closed` counts connections that
  // ended before their response was written, and must outlive this.
  static absl::StatusOr<std::unique_ptr<HttpListener>> Start(const Options& options,
                                                             std::vector<UniqueFd> listeners,
                                                             Handler handler, Counter& closed);
  // Stops; responses that are being made are dropped.
  virtual ~HttpListener() = default;
};

}  // namespace crumb::server
