// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "common/unique_fd.h"

namespace crumb::server {

// Connections of a caller that opens them and sends nothing, or only the test's bytes.
class RawConnections {
 public:
  // Connects to a TCP port of the loopback interface from a loopback address, such as "127.0.0.2".
  // Returns false if the connection is refused.
  bool OpenTcp(const std::string& from, int port);
  // Connects to a Unix stream socket.
  bool OpenUnix(const std::string& path);

  // Sends bytes over a connection; false: it has ended.
  bool Send(size_t connection, const std::string& bytes);
  // Those that the other side has not closed.
  size_t Open() const;
  size_t size() const { return sockets_.size(); }
  void CloseAll() { sockets_.clear(); }

 private:
  std::vector<UniqueFd> sockets_;
};

// The port of "HOST:PORT".
int PortOfAddress(const std::string& address);

}  // namespace crumb::server
