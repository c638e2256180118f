// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "tests/server/unfinished_calls.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace crumb::server {
namespace {

// RFC 9113, section 6.
constexpr uint8_t kData = 0, kHeaders = 1, kReset = 3, kSettings = 4, kPing = 6, kWindowUpdate = 8;
constexpr uint8_t kAck = 1, kEndStream = 1, kEndHeaders = 4;
constexpr uint16_t kInitialWindowSize = 4;
constexpr size_t kFrameBytesMax = 16'384;
constexpr size_t kFrameHeader = 9;

uint32_t Number(const std::string& bytes, size_t at, size_t count) {
  uint32_t number = 0;
  for (size_t i = 0; i < count; ++i) number = number << 8 | static_cast<uint8_t>(bytes[at + i]);
  return number;
}

std::string Bytes(uint32_t number, int count) {
  std::string bytes;
  for (int i = count - 1; i >= 0; --i) bytes += static_cast<char>(number >> (8 * i));
  return bytes;
}

// A literal header field without indexing, RFC 7541, section 6.2.2.
std::string Field(const std::string& name, const std::string& value) {
  return std::string(1, '\0') + static_cast<char>(name.size()) + name +
         static_cast<char>(value.size()) + value;
}

constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

// The connection, or none.
UniqueFd ConnectTo(const std::string& socket) {
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, socket.c_str(), sizeof(address.sun_path) - 1);
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return {};
  }
  return fd;
}

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, const std::string& payload) {
  return Bytes(static_cast<uint32_t>(payload.size()), 3) + static_cast<char>(type) +
         static_cast<char>(flags) + Bytes(stream, 4) + payload;
}

std::string CallHeaders(const std::string& method) {
  return Field(":method", "POST") + Field(":scheme", "http") + Field(":path", method) +
         Field(":authority", "localhost") + Field("te", "trailers") +
         Field("content-type", "application/grpc");
}

}  // namespace

UnreadCalls::UnreadCalls(const std::string& socket, const std::string& method, int calls,
                         const std::string& request, const std::string& session)
    : fd_(ConnectTo(socket)) {
  if (!fd_.valid()) return;
  const std::string token = session.empty() ? "" : Field("crumb-session", session);
  const std::string message =
      std::string(1, '\0') + Bytes(static_cast<uint32_t>(request.size()), 4) + request;
  std::string bytes = kPreface + Frame(kSettings, 0, 0, Bytes(kInitialWindowSize, 2) + Bytes(0, 4));
  for (int i = 0; i < calls; ++i) {
    const auto stream = static_cast<uint32_t>(2 * i + 1);
    bytes += Frame(kHeaders, kEndHeaders, stream, CallHeaders(method) + token);
    bytes += Frame(kData, kEndStream, stream, message);
  }
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t sent = ::send(fd_.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (sent <= 0) {
      fd_.Reset();
      return;
    }
    done += static_cast<size_t>(sent);
  }
}

UnfinishedCalls::UnfinishedCalls(const std::string& socket, int calls, uint32_t message_bytes,
                                 const std::string& content, const std::string& token)
    : fd_(ConnectTo(socket)), content_(content) {
  if (!fd_.valid()) return;
  Send(kPreface);
  SendFrame(kSettings, 0, 0, "");
  const std::string headers = CallHeaders("/crumb.v1.CacheService/Lookup") +
                              (token.empty() ? "" : Field("authorization", "Bearer " + token));
  while (Receive(200)) {
  }
  for (int i = 0; i < calls; ++i, next_stream_ += 2) {
    SendFrame(kHeaders, kEndHeaders, next_stream_, headers);
    SendFrame(kData, 0, next_stream_, std::string(1, '\0') + Bytes(message_bytes, 4));
    window_ -= 5;
    calls_[next_stream_] = {initial_window_ - 5, message_bytes - 1, 0};
  }
}

void UnfinishedCalls::Push(int quiet_ms) {
  while (!closed_ && (SendData() || Receive(quiet_ms))) {
  }
}

void UnfinishedCalls::FillSocket(int calls) {
  const std::string headers = CallHeaders("/no.Service/Method");
  // Less than the server allows at a time.
  constexpr int kAtOnce = 50;
  for (int i = 0; i < calls; ++i, next_stream_ += 2) {
    SendFrame(kHeaders, kEndHeaders | kEndStream, next_stream_, headers);
    if (i % kAtOnce == 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
}

void UnfinishedCalls::SendLastBytes(char last) {
  for (const auto& [stream, call] : calls_) {
    SendFrame(kData, kEndStream, stream, std::string(1, last));
  }
}

void UnfinishedCalls::Send(const std::string& bytes) {
  size_t done = 0;
  while (done < bytes.size() && !closed_) {
    const ssize_t sent = ::send(fd_.get(), bytes.data() + done, bytes.size() - done, MSG_NOSIGNAL);
    if (sent <= 0) closed_ = true;
    done += static_cast<size_t>(std::max<ssize_t>(sent, 0));
  }
}

void UnfinishedCalls::SendFrame(uint8_t type, uint8_t flags, uint32_t stream,
                                const std::string& payload) {
  Send(Frame(type, flags, stream, payload));
}

bool UnfinishedCalls::Receive(int wait_ms) {
  pollfd waiting{fd_.get(), POLLIN, 0};
  if (closed_ || ::poll(&waiting, 1, wait_ms) <= 0) return false;
  char buffer[65'536];
  const ssize_t size = ::recv(fd_.get(), buffer, sizeof(buffer), 0);
  if (size <= 0) {
    closed_ = true;
    return false;
  }
  received_.append(buffer, static_cast<size_t>(size));
  size_t at = 0;
  while (received_.size() - at >= kFrameHeader) {
    const size_t bytes = Number(received_, at, 3);
    if (received_.size() - at < kFrameHeader + bytes) break;
    OnFrame(static_cast<uint8_t>(received_[at + 3]), static_cast<uint8_t>(received_[at + 4]),
            Number(received_, at + 5, 4), received_.substr(at + kFrameHeader, bytes));
    at += kFrameHeader + bytes;
  }
  received_.erase(0, at);
  return true;
}

void UnfinishedCalls::OnFrame(uint8_t type, uint8_t flags, uint32_t stream,
                              const std::string& payload) {
  if (type == kSettings && (flags & kAck) == 0) {
    for (size_t at = 0; at + 6 <= payload.size(); at += 6) {
      if (Number(payload, at, 2) != kInitialWindowSize) continue;
      const int64_t window = Number(payload, at + 2, 4);
      for (auto& [number, call] : calls_) call.window += window - initial_window_;
      initial_window_ = window;
    }
    SendFrame(kSettings, kAck, 0, "");
  } else if (type == kPing && (flags & kAck) == 0) {
    SendFrame(kPing, kAck, 0, payload);
  } else if (type == kWindowUpdate && payload.size() == 4) {
    const int64_t more = Number(payload, 0, 4);
    if (stream == 0) window_ += more;
    const auto call = calls_.find(stream);
    if (call != calls_.end()) call->second.window += more;
  } else if (type == kReset) {
    calls_.erase(stream);
  }
}

bool UnfinishedCalls::SendData() {
  bool any = false;
  for (auto& [stream, call] : calls_) {
    const int64_t most = std::min<int64_t>({window_, call.window, call.left, kFrameBytesMax});
    if (most <= 0) continue;
    std::string bytes;
    for (int64_t i = 0; i < most; ++i)
      bytes += content_[(call.sent + static_cast<uint64_t>(i)) % content_.size()];
    SendFrame(kData, 0, stream, bytes);
    window_ -= most;
    call.sent += static_cast<uint64_t>(most);
    call.window -= most;
    call.left -= static_cast<uint32_t>(most);
    sent_ += static_cast<uint64_t>(most);
    any = true;
  }
  return any;
}

}  // namespace crumb::server
