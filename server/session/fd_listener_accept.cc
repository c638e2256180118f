// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <utility>

#include "common/logging.h"
#include "server/session/epoll_fd_listener.h"

namespace crumb::server {
namespace {

// How long accepting pauses when descriptors have run out.
constexpr auto kAcceptPause = std::chrono::milliseconds(200);
// Connections that are accepted before other events are looked at.
constexpr int kAcceptsAtOnce = 64;

}  // namespace

void EpollFdListener::Accept() {
  for (int accepted = 0; accepted < kAcceptsAtOnce; ++accepted) {
    if (TooManyClosing()) return PauseAccepting(Clock::Real().Now() + kAcceptPause);
    if (handshakes_.full() && !MakePlace()) return PauseAccepting(handshakes_.NextToClose());
    auto socket = std::make_shared<const UniqueFd>(
        ::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket->valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
        // Each streak of failures is logged once.
        if (!std::exchange(out_of_descriptors_, true)) {
          LogWarning("no more descriptors: new sessions wait");
        }
        PauseAccepting(Clock::Real().Now() + kAcceptPause);
      }
      return;
    }
    out_of_descriptors_ = false;
    Greet(std::move(socket));
  }
}

void EpollFdListener::Greet(SharedFd socket) {
  const auto peer = CredentialsOf(socket->get());
  Connection connection;
  connection.user = peer.ok() ? peer->uid : 0;
  connection.socket = std::move(socket);
  const uint64_t number = ++last_number_;
  if (!peer.ok() || Blocks(OwnerOfConnection(connection)) ||
      !Add(connection.socket->get(), WordOf(number, Source::kSocket)).ok()) {
    metrics_.hellos_refused.Add();
    return Forget(connection, &connection.socket);
  }
  handshakes_.Add(number, connection.user, Clock::Real().Now());
  connections_.emplace(number, std::move(connection));
}

bool EpollFdListener::MakePlace() {
  const auto number = handshakes_.ToClose(Clock::Real().Now());
  if (!number) return false;
  Connection& connection = connections_.at(*number);
  if (HasMessage(connection.socket)) {  // its hello came meanwhile
    OnSocket(*number, connection);
    return true;
  }
  metrics_.hellos_refused.Add();
  Close(*number);
  return true;
}

void EpollFdListener::PauseAccepting(TimePoint until) {
  metrics_.accept_pauses.Add();
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
  accept_paused_ = true;
  accept_again_ = until;
}

void EpollFdListener::ResumeAccepting() {
  if (!accept_paused_) return;
  const bool has_place = !out_of_descriptors_ && !handshakes_.full() && !TooManyClosing();
  if (!has_place && Clock::Real().Now() < accept_again_) return;
  accept_paused_ = !Add(listener_.get(), kListenerWord).ok();
  accept_again_ = Clock::Real().Now() + kAcceptPause;
}

void EpollFdListener::DropLateHellos() {
  while (const auto number = handshakes_.Late(Clock::Real().Now())) {
    metrics_.hellos_refused.Add();
    Close(*number);
  }
}

}  // namespace crumb::server
