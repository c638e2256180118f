// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "client/rpc/call_socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <utility>

#include "common/call_message.h"

namespace crumb::client {
namespace {

timespec Left(TimePoint deadline) {
  // A day at most: a deadline that means "never" would overflow.
  const Duration left = deadline - std::min(deadline, Clock::Real().Now());
  const auto ns = std::min<Duration>(left, std::chrono::hours(24)).count();
  return {.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
}

uint64_t MicrosecondsLeft(TimePoint deadline) {
  const timespec left = Left(deadline);
  return static_cast<uint64_t>(left.tv_sec) * 1'000'000 +
         static_cast<uint64_t>(left.tv_nsec) / 1000;
}

}  // namespace

class CallSocket::SocketCall final : public PendingCall {
 public:
  SocketCall(CallSocket& socket, uint64_t number, TimePoint deadline, v1::AcquireResponse* response,
             ResponseFlags* flags)
      : socket_(socket), number_(number), deadline_(deadline), response_(response), flags_(flags) {}
  ~SocketCall() override {
    if (!ended_) socket_.NoteEnded();
  }

  bool Ready() override { return ended_ || Look(TimePoint::min()); }

  absl::Status Finish() override {
    if (!ended_) Look(deadline_);
    if (!ended_) Take(absl::DeadlineExceededError("crumbd did not respond in time"));
    return status_;
  }

 private:
  bool Look(TimePoint until) {
    v1::SocketAnswer answer;
    absl::Status received = socket_.Receive(number_, until, &answer);
    if (absl::IsDeadlineExceeded(received)) return false;
    if (received.ok() && answer.code() != 0) {
      received = absl::Status(static_cast<absl::StatusCode>(answer.code()), answer.error());
    }
    if (received.ok()) {
      response_->Swap(answer.mutable_acquire());
      flags_->fragments_apart = answer.fragments_apart();
    }
    Take(std::move(received));
    return true;
  }

  void Take(absl::Status status) {
    status_ = std::move(status);
    ended_ = true;
    socket_.NoteEnded();
  }

  CallSocket& socket_;
  const uint64_t number_;
  const TimePoint deadline_;
  v1::AcquireResponse* const response_;
  ResponseFlags* const flags_;
  bool ended_ = false;
  absl::Status status_;
};

std::unique_ptr<PendingCall> CallSocket::Start(const v1::AcquireRequest& request,
                                               TimePoint deadline, v1::AcquireResponse* response,
                                               ResponseFlags* flags) {
  // Leaves room for the fields around the request.
  constexpr size_t kRequestBytesMax = kCallMessageBytesMax - 64;
  if (request.ByteSizeLong() > kRequestBytesMax) return nullptr;
  {
    MutexLock lock(&mutex_);
    if (in_flight_ || closed_) return nullptr;
    in_flight_ = true;
  }
  v1::SocketCall call;
  call.set_timeout_us(MicrosecondsLeft(deadline));
  // The message borrows the request instead of copying it.
  call.unsafe_arena_set_allocated_acquire(const_cast<v1::AcquireRequest*>(&request));
  call.SerializeToString(&buffer_);
  call.unsafe_arena_release_acquire();
  ssize_t sent;
  do {
    sent = ::send(socket_.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) {
    return std::make_unique<SocketCall>(*this, request.request(), deadline, response, flags);
  }
  if (errno == EPIPE || errno == ECONNRESET) NoteClosed();
  NoteEnded();
  return nullptr;
}

absl::Status CallSocket::Receive(uint64_t number, TimePoint deadline, v1::SocketAnswer* answer) {
  buffer_.resize(kCallMessageBytesMax);
  while (true) {
    pollfd waiting{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    const timespec left = Left(deadline);
    const int ready = ::ppoll(&waiting, 1, &left, nullptr);
    if (ready == 0) return absl::DeadlineExceededError("no response yet");
    if (ready < 0 && errno == EINTR) continue;
    const ssize_t size =
        ::recv(socket_.get(), buffer_.data(), buffer_.size(), MSG_DONTWAIT | MSG_TRUNC);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (size <= 0 || static_cast<size_t>(size) > buffer_.size() ||
        !answer->ParseFromArray(buffer_.data(), static_cast<int>(size))) {
      NoteClosed();
      return absl::UnavailableError("crumbd's socket for calls is closed or out of step");
    }
    if (answer->request() == number) return absl::OkStatus();
  }
}

void CallSocket::NoteClosed() {
  MutexLock lock(&mutex_);
  closed_ = true;
}

void CallSocket::NoteEnded() {
  MutexLock lock(&mutex_);
  in_flight_ = false;
}

}  // namespace crumb::client
