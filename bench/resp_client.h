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

// The part of Redis's protocol that SET and GET need, over one blocking TCP connection. Values are
// sent from and received into the caller's memory. After an error the connection is of no more use.
// Not thread-safe.
class RespClient {
 public:
  // kUnavailable: nobody listens at `host` (an IPv4 address or a name) and `port`.
  static absl::StatusOr<std::unique_ptr<RespClient>> Connect(const std::string& host, int port);

  absl::Status Ping();
  // kFailedPrecondition with the server's text when it refuses.
  absl::Status Set(const std::string& key, std::span<const std::byte> value);
  // Fills `value` and returns the value's size; kNotFound: no such key; kInvalidArgument: the value
  // is larger than `value`; kInternal: the answer is not RESP.
  absl::StatusOr<size_t> Get(const std::string& key, std::span<std::byte> value);

 private:
  explicit RespClient(UniqueFd socket) : socket_(std::move(socket)), buffer_(kBufferBytes) {}

  static constexpr size_t kBufferBytes = 64 << 10;

  absl::Status Send(const std::string& head, std::span<const std::byte> body,
                    const std::string& tail);
  absl::Status Fill();
  // Reads one line into line_, without its end.
  absl::Status ReadLine();
  absl::Status ReadBytes(std::span<std::byte> out);
  absl::Status ExpectOk(const std::string& expected);

  UniqueFd socket_;
  std::vector<std::byte> buffer_;  // [begin_, end_) is received and not used yet
  size_t begin_ = 0;
  size_t end_ = 0;
  std::string line_;
};

}  // namespace crumb::bench
