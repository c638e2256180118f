// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace crumb::transport {

// A running transport_serving_peer; killed with this object.
class PeerProcess {
 public:
  // Null: it did not start.
  static std::unique_ptr<PeerProcess> Start(bool rendezvous);
  ~PeerProcess();

  const std::string& address() const { return address_; }
  void Signal(int signal);
  // SIGKILL, and waits for its end.
  void Kill();

 private:
  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace crumb::transport
