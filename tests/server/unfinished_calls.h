// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "common/unique_fd.h"

namespace crumb::server {

// A caller without a token that uses just enough HTTP/2 to begin gRPC calls whose messages never
// end: as many bytes of each as the server's flow control lets through, and then silence.
class UnfinishedCalls {
 public:
  // Connects to the Unix socket and begins `calls` calls, each of a message that claims to have
  // `message_bytes`, which repeat `content`. connected() is false when there is no connection.
  UnfinishedCalls(const std::string& socket, int calls, uint32_t message_bytes,
                  const std::string& content = "x", const std::string& token = "");

  // Sends until the server has let nothing through for `quiet_ms`, or until only the last byte of
  // each message is left.
  void Push(int quiet_ms);
  // Makes `calls` calls that the server refuses, and does not read the statuses, which fill the
  // socket. Afterwards the server can send nothing.
  void FillSocket(int calls);
  // Sends the last byte of each message.
  void SendLastBytes(char last);

  bool connected() const { return fd_.valid(); }
  uint64_t sent_bytes() const { return sent_; }
  // Whether the server has closed the connection.
  bool closed() const { return closed_; }

 private:
  struct Call {
    int64_t window = 65'535;
    uint32_t left = 0;  // bytes of the message, without the last one
    uint64_t sent = 0;
  };

  void Send(const std::string& bytes);
  void SendFrame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload);
  // Reads frames for `wait_ms`. False: none came.
  bool Receive(int wait_ms);
  void OnFrame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload);
  // True: something was sent.
  bool SendData();

  UniqueFd fd_;
  const std::string content_;
  uint32_t next_stream_ = 1;
  std::string received_;
  int64_t window_ = 65'535;
  int64_t initial_window_ = 65'535;
  std::map<uint32_t, Call> calls_;
  uint64_t sent_ = 0;
  bool closed_ = false;
};

// A caller who begins gRPC calls and has a flow control window of 0, so that no byte of a response
// is ever sent.
class UnreadCalls {
 public:
  // Connects to the Unix socket and begins `calls` calls of `method`, such as
  // "/crumb.v1.CacheService/Stats", with this request and, if it is not empty, session token.
  // connected() is false if there is no connection.
  UnreadCalls(const std::string& socket, const std::string& method, int calls,
              const std::string& request = "", const std::string& session = "");

  bool connected() const { return fd_.valid(); }
  void Close() { fd_.Reset(); }

 private:
  UniqueFd fd_;
};

}  // namespace crumb::server
