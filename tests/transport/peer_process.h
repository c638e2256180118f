// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace crumb::transport {

// A running transport_serving_peer, which the destructor kills.
class PeerProcess {
 public:
  // Returns null if it did not start.
  static std::unique_ptr<PeerProcess> Start(bool rendezvous);
  ~PeerProcess();

  const std::string& address() const { return address_; }
  void Signal(int signal);
  // Sends SIGKILL and waits for the end of the process.
  void Kill();

 private:
  pid_t pid_ = -1;
  std::string address_;
};

}  // namespace crumb::transport
