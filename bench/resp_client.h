// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/unique_fd.h"

namespace crumb::bench {

// A client for SET and GET of Redis, over one blocking TCP connection. Values are sent from and
// received into the caller's memory. After an error the connection must not be used any more. Not
// thread-safe.
class RespClient {
 public:
  // `host` is an IPv4 address or a name. kUnavailable: no server listens there.
  static absl::StatusOr<std::unique_ptr<RespClient>> Connect(const std::string& host, int port);

  // Checks that the server responds. The errors of all functions are kUnavailable if the connection
  // ends.
  absl::Status Ping();
  // kFailedPrecondition: the server refused; the message is its text.
  absl::Status Set(const std::string& key, std::span<const std::byte> value);
  // Reads a value into `value` and returns its size. kNotFound: no such key; kInvalidArgument: the
  // value is larger than `value`; kInternal: the reply is not RESP.
  absl::StatusOr<size_t> Get(const std::string& key, std::span<std::byte> value);

 private:
  explicit RespClient(UniqueFd socket) : socket_(std::move(socket)), buffer_(kBufferBytes) {}

  static constexpr size_t kBufferBytes = 64 << 10;

  // Sends the three pieces one after the other.
  absl::Status Send(const std::string& head, std::span<const std::byte> body,
                    const std::string& tail);
  // Receives more bytes into the buffer, which has been used up.
  absl::Status Fill();
  // Reads one line into line_, without its line end.
  absl::Status ReadLine();
  // Reads exactly as many bytes as `out` has.
  absl::Status ReadBytes(std::span<std::byte> out);
  // Reads a status line. kFailedPrecondition: it is an error of the server.
  absl::Status ExpectOk(const std::string& expected);

  UniqueFd socket_;
  std::vector<std::byte> buffer_;  // [begin_, end_) was received and not used yet
  size_t begin_ = 0;
  size_t end_ = 0;
  std::string line_;
};

}  // namespace crumb::bench
