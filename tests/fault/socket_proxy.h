// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <list>
#include <string>

#include "common/mutex.h"
#include "common/thread.h"
#include "common/unique_fd.h"

namespace crumb::fault {

// Stands between clients and a Unix socket, and passes bytes on as they come. On
// request it keeps responses back and cuts connections.
class SocketProxy {
 public:
  // Listens at `path` for connections to `target`.
  SocketProxy(std::string path, std::string target);
  ~SocketProxy();
  SocketProxy(const SocketProxy&) = delete;
  SocketProxy& operator=(const SocketProxy&) = delete;

  // From now on drops the bytes that the target sends over the existing connections. The clients'
  // bytes still arrive.
  void SwallowResponses();
  // Ends these connections, on both sides.
  void Cut();

 private:
  struct Passing {
    UniqueFd client, target;
    std::atomic<bool> swallow{false};
    Thread to_target, to_client;
  };
  void Accept();
  static void Pass(int from, int to, const std::atomic<bool>* swallow);

  const std::string target_;
  UniqueFd listening_;
  std::atomic<bool> stopping_{false};
  Mutex mutex_;
  std::list<Passing> passing_ ABSL_GUARDED_BY(mutex_);
  Thread thread_;
};

}  // namespace crumb::fault
