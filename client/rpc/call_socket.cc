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
#include "common/page_key.h"

namespace crumb::client {
namespace {

// Leaves room for the fields around the request.
constexpr size_t kRequestBytesMax = kCallMessageBytesMax - 64;

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

// Returns whether crumbd serves a call of this size over the socket.
bool Fits(const v1::SocketCall& call) {
  switch (call.call_case()) {
    case v1::SocketCall::kAcquire:
      return call.acquire().ByteSizeLong() <= kRequestBytesMax;
    case v1::SocketCall::kReserve:
      return call.reserve().count() <= kCallFragmentsMax &&
             call.reserve().keys().size() <= kCallFragmentsMax * sizeof(PageKey) &&
             call.reserve().pool().empty();
    case v1::SocketCall::kCommit:
      return call.commit().offsets_size() <= kCallFragmentsMax && call.commit().pool().empty();
    case v1::SocketCall::CALL_NOT_SET:
      break;
  }
  return false;
}

}  // namespace

class CallSocket::SocketCall final : public PendingCall {
 public:
  SocketCall(CallSocket& socket, uint64_t number, TimePoint deadline, v1::SocketResponse* response)
      : socket_(socket), number_(number), deadline_(deadline), response_(response) {}
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
    absl::Status received = socket_.Receive(number_, until, response_);
    if (absl::IsDeadlineExceeded(received)) return false;
    if (received.ok() && response_->code() != 0) {
      received = absl::Status(static_cast<absl::StatusCode>(response_->code()), response_->error());
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
  v1::SocketResponse* const response_;
  bool ended_ = false;
  absl::Status status_;
};

bool CallSocket::Begin() {
  MutexLock lock(&mutex_);
  if (in_flight_ || closed_) return false;
  in_flight_ = true;
  return true;
}

std::unique_ptr<PendingCall> CallSocket::Start(v1::SocketCall& call, TimePoint deadline,
                                               v1::SocketResponse* response) {
  if (!Fits(call) || !Begin()) return nullptr;
  if (!call.has_acquire()) call.set_request(++last_number_);
  const uint64_t number = call.has_acquire() ? call.acquire().request() : call.request();
  call.set_timeout_us(MicrosecondsLeft(deadline));
  call.SerializeToString(&sent_);
  ssize_t sent;
  do {
    sent = ::send(socket_.get(), sent_.data(), sent_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent >= 0) return std::make_unique<SocketCall>(*this, number, deadline, response);
  if (errno == EPIPE || errno == ECONNRESET) NoteClosed();
  NoteEnded();
  return nullptr;
}

absl::Status CallSocket::Receive(uint64_t number, TimePoint deadline,
                                 v1::SocketResponse* response) {
  if (received_ == nullptr) {
    received_ = std::make_unique_for_overwrite<char[]>(kCallMessageBytesMax);
  }
  while (true) {
    pollfd waiting{.fd = socket_.get(), .events = POLLIN, .revents = 0};
    const timespec left = Left(deadline);
    const int ready = ::ppoll(&waiting, 1, &left, nullptr);
    if (ready == 0) return absl::DeadlineExceededError("no response yet");
    if (ready < 0 && errno == EINTR) continue;
    const ssize_t size =
        ::recv(socket_.get(), received_.get(), kCallMessageBytesMax, MSG_DONTWAIT | MSG_TRUNC);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (size <= 0 || static_cast<size_t>(size) > kCallMessageBytesMax ||
        !response->ParseFromArray(received_.get(), static_cast<int>(size))) {
      NoteClosed();
      return absl::UnavailableError("crumbd's socket for calls is closed or out of step");
    }
    if (response->request() == number) return absl::OkStatus();
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
