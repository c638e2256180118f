// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "common/thread.h"
#include "common/unique_fd.h"

namespace crumb::bench {

// Accepts one connection on a loopback port. It passes every piece that arrives to `answer`, and
// sends the returned bytes. The connection ends if `answer` returns "" and sets `*close`, if the
// peer closes it, or with this object.
class ScriptedServer {
 public:
  using Answer = std::function<std::string(const std::string& piece, bool* close)>;

  explicit ScriptedServer(Answer answer);
  ~ScriptedServer();

  int port() const { return port_; }

 private:
  void Run();

  const Answer answer_;
  UniqueFd listener_;
  int port_ = 0;
  Thread thread_;
};

}  // namespace crumb::bench
