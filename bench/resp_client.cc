// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "bench/resp_client.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>

#include "common/errno_status.h"
#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::bench {
namespace {

constexpr size_t kLineBytesMax = 4096;

absl::Status NotResp(const std::string& line) {
  return absl::InternalError("the server's answer is not RESP: '" + line.substr(0, 80) + "'");
}

}  // namespace

absl::StatusOr<std::unique_ptr<RespClient>> RespClient::Connect(const std::string& host, int port) {
  const std::string where = fmt::format("{}:{}", host, port);
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
    return absl::UnavailableError(where + ": no such host");
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> address(found, &::freeaddrinfo);
  UniqueFd socket(::socket(address->ai_family, address->ai_socktype | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return ErrnoStatus(errno, "socket");
  if (::connect(socket.get(), address->ai_addr, address->ai_addrlen) != 0) {
    return ErrnoStatus(errno, "connect to " + where);
  }
  const int on = 1;
  ::setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  return std::unique_ptr<RespClient>(new RespClient(std::move(socket)));
}

absl::Status RespClient::Ping() {
  CRUMB_RETURN_IF_ERROR(Send("*1\r\n$4\r\nPING\r\n", {}, ""));
  return ExpectOk("+PONG");
}

absl::Status RespClient::Set(const std::string& key, std::span<const std::byte> value) {
  const std::string head =
      fmt::format("*3\r\n${}\r\nSET\r\n${}\r\n{}\r\n${}\r\n", 3, key.size(), key, value.size());
  CRUMB_RETURN_IF_ERROR(Send(head, value, "\r\n"));
  return ExpectOk("+OK");
}

absl::StatusOr<size_t> RespClient::Get(const std::string& key, std::span<std::byte> value) {
  CRUMB_RETURN_IF_ERROR(
      Send(fmt::format("*2\r\n$3\r\nGET\r\n${}\r\n{}\r\n", key.size(), key), {}, ""));
  CRUMB_RETURN_IF_ERROR(ReadLine());
  if (line_.starts_with('-')) return absl::FailedPreconditionError(line_.substr(1));
  if (line_ == "$-1") return absl::NotFoundError("no value under this key");
  size_t size = 0;
  const char* end = line_.data() + line_.size();
  if (!line_.starts_with('$') || std::from_chars(line_.data() + 1, end, size).ptr != end ||
      line_.size() < 2) {
    return NotResp(line_);
  }
  if (size > value.size()) {
    return absl::InvalidArgumentError(
        fmt::format("the value has {} bytes, there is room for {}", size, value.size()));
  }
  CRUMB_RETURN_IF_ERROR(ReadBytes(value.first(size)));
  std::byte line_end[2];
  CRUMB_RETURN_IF_ERROR(ReadBytes(line_end));
  if (line_end[0] != std::byte{'\r'} || line_end[1] != std::byte{'\n'}) {
    return NotResp("a value without its end");
  }
  return size;
}

absl::Status RespClient::Send(const std::string& head, std::span<const std::byte> body,
                              const std::string& tail) {
  iovec parts[] = {{const_cast<char*>(head.data()), head.size()},
                   {const_cast<std::byte*>(body.data()), body.size()},
                   {const_cast<char*>(tail.data()), tail.size()}};
  size_t first = 0;
  while (first < std::size(parts)) {
    msghdr message{};
    message.msg_iov = parts + first;
    message.msg_iovlen = std::size(parts) - first;
    ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return ErrnoStatus(errno, "send");
    for (; first < std::size(parts); ++first) {
      const auto taken = std::min(static_cast<size_t>(sent), parts[first].iov_len);
      parts[first].iov_base = static_cast<char*>(parts[first].iov_base) + taken;
      parts[first].iov_len -= taken;
      sent -= static_cast<ssize_t>(taken);
      if (parts[first].iov_len > 0) break;
    }
  }
  return absl::OkStatus();
}

absl::Status RespClient::Fill() {
  begin_ = end_ = 0;
  for (;;) {
    const ssize_t received = ::recv(socket_.get(), buffer_.data(), buffer_.size(), 0);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) return ErrnoStatus(errno, "receive");
    if (received == 0) return absl::UnavailableError("the server closed the connection");
    end_ = static_cast<size_t>(received);
    return absl::OkStatus();
  }
}

absl::Status RespClient::ReadLine() {
  line_.clear();
  while (line_.size() <= kLineBytesMax) {
    if (begin_ == end_) CRUMB_RETURN_IF_ERROR(Fill());
    line_ += static_cast<char>(buffer_[begin_++]);
    if (line_.ends_with("\r\n")) {
      line_.resize(line_.size() - 2);
      return absl::OkStatus();
    }
  }
  return NotResp(line_);
}

absl::Status RespClient::ReadBytes(std::span<std::byte> out) {
  const size_t ready = std::min(out.size(), end_ - begin_);
  std::memcpy(out.data(), buffer_.data() + begin_, ready);
  begin_ += ready;
  // The rest is received directly into its destination.
  for (out = out.subspan(ready); !out.empty();) {
    const ssize_t received = ::recv(socket_.get(), out.data(), out.size(), MSG_WAITALL);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0) return ErrnoStatus(errno, "receive");
    if (received == 0) return absl::UnavailableError("the server closed the connection");
    out = out.subspan(static_cast<size_t>(received));
  }
  return absl::OkStatus();
}

absl::Status RespClient::ExpectOk(const std::string& expected) {
  CRUMB_RETURN_IF_ERROR(ReadLine());
  if (line_ == expected) return absl::OkStatus();
  if (line_.starts_with('-')) return absl::FailedPreconditionError(line_.substr(1));
  return NotResp(line_);
}

}  // namespace crumb::bench
