// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "common/clock.h"
#include "common/fd_channel.h"
#include "common/thread.h"
#include "server/base/handshakes.h"
#include "server/base/owner_tasks.h"
#include "server/session/connection.h"
#include "server/session/fd_listener.h"
#include "server/session/hello.h"
#include "server/session/pool_requests.h"
#include "server/session/unread_descriptors.h"

namespace crumb::server {

// FdListener with epoll: one thread, crumb-sessions, handles all sockets and pidfds. A connection
// is accepted, sends its hello, which opens its session, and stays until its process ends:
//
//   listener --Accept--> Greet --hello: OnSocket--> OpenSession, Welcome --pidfd: OnProcessEnd-->
//   Close
//
// fd_listener.cc has sessions and their sockets, fd_listener_accept.cc the way to the hello.
// Functions other than Open and Wake are the thread's.
class EpollFdListener : public FdListener {
 public:
  // REQUIRES: Open before anything else.
  EpollFdListener(const Options& options, SessionTable& sessions, storage::TieredStore& store,
                  ServerMetrics& metrics);
  ~EpollFdListener() override;

  // Listens at the socket and starts the thread. Errors as FdListener::Start.
  absl::Status Open();

 private:
  // The descriptor of a connection that an event concerns.
  enum class Source : uint64_t { kSocket, kPidfd, kPools };
  // Epoll's word of an event, which names the connection without a pointer that could dangle.
  // Connections are numbered from 1 and numbers are not reused: the word is the number times 4,
  // plus the source. The words of number 0 are those of the listener and of wake_.
  static constexpr uint64_t kListenerWord = 0;
  static constexpr uint64_t kWakeWord = 1;
  static constexpr uint64_t WordOf(uint64_t number, Source source) {
    return number << 2 | static_cast<uint64_t>(source);
  }

  // The thread: handles events and deadlines until stopped. One round handles the events that epoll
  // reports, up to 64, then closes connections whose hello is late, accepts again if it had paused,
  // and checks the pools.
  void Run();
  // Makes the thread look for ended sessions and for stopping_. Thread-safe.
  void Wake();
  // Returns the milliseconds until the next deadline (a late hello, the end of a pause, a check of
  // pools), 60,000 at most; -1 when there is none.
  int WaitMs() const;
  // Handles one event. Its connection may have been closed by an earlier event of the round.
  void Handle(uint64_t word);
  // Has epoll report messages of `fd` with `word`, as long as there are any (level-triggered).
  absl::Status Add(int fd, uint64_t word);

  // Accepts connections, up to a bound, and pauses when descriptors or places have run out. At most
  // 64 are accepted before other events are handled.
  void Accept();
  // Adds an accepted connection, which has sessions.hello_timeout to send its hello. Closes it at
  // once, and counts it, if its user is unknown or blocks closes, or epoll refuses it.
  void Greet(SharedFd socket);
  // Closes a connection that is silent for too long while others wait. Returns false if there is
  // none.
  bool MakePlace();
  // New connections wait in the socket's backlog until then, or until a place is free. `until` is
  // the time at which another attempt is worthwhile whatever happens.
  void PauseAccepting(TimePoint until);
  // Accepts again if accepting is paused and there is a place, or the time has come.
  void ResumeAccepting();
  // Closes connections whose hello is late.
  void DropLateHellos();

  // Handles a message of the connection's own socket: its hello, a PoolRequest, or its end.
  void OnSocket(uint64_t number, Connection& connection);
  // Handles a message of the socket for pools. Any other message than a PoolRequest closes it.
  void OnPools(Connection& connection);
  // Ends the session of a process that has ended.
  void OnProcessEnd(uint64_t number, Connection& connection);
  // Closes connections whose session another thread has ended.
  void DropEnded();

  // Opens the session of a hello and sends the welcome. Returns false if the hello was refused or
  // the welcome could not be sent: it is counted, the process was sent the reason of a refusal, and
  // the caller closes the connection.
  bool OpenSession(uint64_t number, Connection& connection, FdMessage& message);
  // Opens a session, unless closes of the tenant's descriptors block (kResourceExhausted).
  absl::StatusOr<std::shared_ptr<Session>> OpenFor(const Connection& connection,
                                                   const SessionTable::OpenRequest& request);
  // Sends the process its slabs and sockets.
  absl::Status Welcome(uint64_t number, Connection& connection, const Hello& hello);
  // Makes a pair of sockets for PoolRequests: this end is the connection's, the other one is
  // returned.
  absl::StatusOr<UniqueFd> OpenPools(uint64_t number, Connection& connection);
  // Opens a socket for calls. Returns number 0 and no socket without a plane.
  absl::StatusOr<CallPlane::Opened> OpenCalls(CallPlane* plane, const Connection& connection);
  // Returns a function that sends messages with descriptors over the connection's socket, within
  // the bound on those that its user or tenant leaves unread.
  DescriptorSender SenderTo(const Connection& connection);

  // Receives a message, with all descriptors that came along. Of a process whose user or tenant
  // makes closes block nothing is received (kResourceExhausted).
  absl::Status Receive(const Connection& connection, const SharedFd& socket, FdMessage* message);
  // Has a task serve a PoolRequest. Returns false, and leaves the message, if it is none, or the
  // process has not read the last response.
  bool ServePools(const Connection& connection, FdMessage& message);
  // Returns whether the connection may send PoolRequests. Slab grants and pool replies on one
  // socket would interleave.
  bool HasPools(const Connection& connection) const;

  // Closes all of a connection and forgets it. Its session is not ended here: the callers have done
  // that, or there is none.
  void Close(uint64_t number);
  // Ends the grants of slabs, whose socket is about to close.
  static void CloseSlabs(Connection& connection) {
    if (connection.slabs != nullptr) connection.slabs->Close();
  }
  // Closes the connection's sockets for calls, if it has any.
  void CloseCalls(Connection& connection) const;
  // Closes descriptors that came from the process. That may block, so its own task does it.
  void CloseReceived(const Connection& connection, FdMessage message);
  // Ends a socket for the process at once. Closing it may block, for descriptors in messages that
  // were not received, and it may be in use by a task: so a task does it.
  void Forget(const Connection& connection, SharedFd* fd);
  // Returns the name under which OwnerTasks counts the connection's descriptors.
  std::string OwnerOfConnection(const Connection& connection) const;
  // Returns whether descriptors of all users and tenants that wait to be closed leave too few for
  // others.
  bool TooManyClosing() const {
    return tasks_->descriptors() >= static_cast<size_t>(options_.limits.closing_total_max);
  }
  // Returns whether the user or tenant has made closes block until so many descriptors wait behind
  // them that nothing more is received from it.
  bool Blocks(const std::string& owner) const {
    return tasks_->descriptors(owner) >= static_cast<size_t>(options_.limits.closing_max);
  }

  const Options options_;
  SessionTable& sessions_;
  storage::TieredStore& store_;
  ServerMetrics& metrics_;
  UniqueFd epoll_;
  UniqueFd wake_;
  UniqueFd listener_;
  std::atomic<bool> stopping_{false};

  // The members from here to pools_next_ belong to the thread and have no lock. last_number_ is the
  // number of the newest connection.
  uint64_t last_number_ = 0;
  std::unordered_map<uint64_t, Connection> connections_;
  // Connections that have not sent their hello, with their deadlines.
  Handshakes handshakes_;
  // True while the listener is not among epoll's descriptors.
  bool accept_paused_ = false;
  // True since accepting failed for lack of descriptors or memory; each streak is logged once.
  bool out_of_descriptors_ = false;
  // End of the pause; read only while accept_paused_.
  TimePoint accept_again_;
  TimePoint pools_next_ = TimePoint::max();  // time of the next check of pools

  const std::shared_ptr<OwnerTasks> tasks_;  // shared with sockets for calls
  const std::shared_ptr<UnreadDescriptors> unread_;
  PoolRequests pools_;
  Thread thread_;
};

}  // namespace crumb::server
