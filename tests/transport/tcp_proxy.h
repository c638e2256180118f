// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

namespace crumb::transport {

// Stands between this process and the TCP connections that its libraries open to the loopback
// address: the test program's own `connect` sends them here. Thread-safe.
class TcpProxy {
 public:
  enum class Mode {
    kForward,
    kDrop,     // bytes are read and thrown away
    kDelay,    // each piece waits
    kCut,      // connections are closed when a piece comes
    kCorrupt,  // a byte behind each `marker` is changed
  };

  // Redirects connections from now on; one proxy at a time.
  explicit TcpProxy(std::vector<std::byte> marker);
  // Closes everything.
  ~TcpProxy();

  // Of all connections, also of those that are open.
  void SetMode(Mode mode) { mode_ = mode; }
  int connections() const { return connections_; }
  int corrupted() const { return corrupted_; }

  // For `connect`: the port to use instead of `port`, or `port` when there is no proxy.
  static int PortInstead(int port);

 private:
  void Listen(int listener, int target);
  void Pass(int from, int to);
  // What is to be sent of a piece that came; false: the connection ends.
  bool Treat(std::byte* piece, size_t& size);
  int Redirect(int port);

  const std::vector<std::byte> marker_;
  std::atomic<Mode> mode_{Mode::kForward};
  std::atomic<bool> ending_{false};
  std::atomic<int> connections_{0}, corrupted_{0};
  std::mutex mutex_;
  std::map<int, int> ports_;  // listening for a target
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
};

}  // namespace crumb::transport
