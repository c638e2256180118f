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
  // Epoll's word of an event. Connections are numbered from 1: the word is the number times 4, plus
  // the source.
  static constexpr uint64_t kListenerWord = 0;
  static constexpr uint64_t kWakeWord = 1;
  static constexpr uint64_t WordOf(uint64_t number, Source source) {
    return number << 2 | static_cast<uint64_t>(source);
  }

  // The thread: handles events and deadlines until stopped.
  void Run();
  // Wakes the thread. Thread-safe.
  void Wake();
  // Returns the time until the next deadline; -1 when there is none.
  int WaitMs() const;
  void Handle(uint64_t word);
  // Has epoll report messages of `fd` with `word`.
  absl::Status Add(int fd, uint64_t word);

  // Accepts connections, up to a bound, and pauses when descriptors or places have run out.
  void Accept();
  // Waits for the connection's hello.
  void Greet(SharedFd socket);
  // Closes a connection that is silent for too long while others wait. Returns false if there is
  // none.
  bool MakePlace();
  // New connections wait in the socket's backlog until then, or until a place is free.
  void PauseAccepting(TimePoint until);
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

  // Opens the session of a hello. False: refused and counted, and the connection is to be closed.
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

  // Closes all of a connection and forgets it.
  void Close(uint64_t number);
  static void CloseSlabs(Connection& connection) {
    if (connection.slabs != nullptr) connection.slabs->Close();
  }
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

  // The thread's own.
  uint64_t last_number_ = 0;
  std::unordered_map<uint64_t, Connection> connections_;
  Handshakes handshakes_;
  bool accept_paused_ = false;
  bool out_of_descriptors_ = false;
  TimePoint accept_again_;
  TimePoint pools_next_ = TimePoint::max();  // time of the next check of pools

  const std::shared_ptr<OwnerTasks> tasks_;  // shared with sockets for calls
  const std::shared_ptr<UnreadDescriptors> unread_;
  PoolRequests pools_;
  Thread thread_;
};

}  // namespace crumb::server
