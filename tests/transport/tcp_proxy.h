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

// A proxy for the TCP connections that this process's libraries open to the loopback address. The
// test program defines `connect`, which redirects them to the proxy. Thread-safe.
class TcpProxy {
 public:
  enum class Mode {
    kForward,
    kDrop,     // bytes are read and dropped
    kDelay,    // each piece is delayed
    kCut,      // connections are closed when a piece arrives
    kCorrupt,  // a byte after each `marker` is changed
  };

  // Redirects connections from now on; one proxy at a time.
  explicit TcpProxy(std::vector<std::byte> marker);
  // Closes everything.
  ~TcpProxy();

  // Applies to all connections, including open ones.
  void SetMode(Mode mode) { mode_ = mode; }
  int connections() const { return connections_; }
  int corrupted() const { return corrupted_; }

  // Returns the port that `connect` uses instead of `port`, or `port` if there is no proxy.
  static int PortInstead(int port);

 private:
  void Listen(int listener, int target);
  void Pass(int from, int to);
  // Changes a piece that arrived to the bytes that are sent. Returns false if the connection ends.
  bool Treat(std::byte* piece, size_t& size);
  int Redirect(int port);

  const std::vector<std::byte> marker_;
  std::atomic<Mode> mode_{Mode::kForward};
  std::atomic<bool> ending_{false};
  std::atomic<int> connections_{0}, corrupted_{0};
  std::mutex mutex_;
  std::map<int, int> ports_;  // listening port by target port
  std::vector<int> sockets_;
  std::vector<std::thread> threads_;
};

}  // namespace crumb::transport
