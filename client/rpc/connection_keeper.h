// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <unordered_map>
#include <vector>

#include "client/rpc/connection.h"
#include "client/rpc/pool_link.h"
#include "client/rpc/rpc_stub.h"
#include "common/mutex.h"
#include "common/thread.h"
#include "crumb/client_options.h"
#include "crumb/counters.h"
#include "crumb/keyspace_info.h"

namespace crumb::client {

// Keeps one connection to crumbd: opens it, holds its session stream, opens another when it is
// lost, and gives leases and staging room back. Its thread sleeps while nothing happens.
// Thread-safe. In a forked child only the methods that say so may be called.
class ConnectionKeeper {
 public:
  explicit ConnectionKeeper(const ClientOptions& options);
  ~ConnectionKeeper();

  // Starts the thread and waits for the outcome of its first attempt.
  void Start();
  // Gives back what is pending, closes the connection, joins. Idempotent.
  void Stop();

  // Null when there is none now.
  std::shared_ptr<Connection> current() const;
  // Null when there is none by `deadline`.
  std::shared_ptr<Connection> Wait(TimePoint deadline) const;

  // Gives a lease or staging room back, soon. In a forked child: does nothing, they are the
  // parent's.
  void ReleaseLater(std::shared_ptr<Connection> connection, uint64_t lease);
  void AbortLater(std::shared_ptr<Connection> connection, uint64_t offset);
  // Gives back the lease of an Acquire whose answer did not arrive, if there is one.
  void ForgetLater(std::shared_ptr<Connection> connection, uint64_t request);

  // Gives slots of a device pool back, soon.
  void ReleaseSlotsLater(std::shared_ptr<Connection> connection, const PoolId& pool,
                         std::span<const uint64_t> slots);

  // `listener` hears of connections and demotions, on the thread, until StopListening returns. See
  // PoolLink::Listen.
  absl::Status Listen(const PoolName& pool, PoolListener* listener);
  void StopListening(PoolListener* listener);

  Duration call_timeout() const { return options_.call_timeout; }

  void Count(const SessionCounters& amounts);

  KeyspaceState StateOf(const KeyspaceId& keyspace) const;
  void NoteState(const KeyspaceId& keyspace, KeyspaceState state);
  // The highest generation that was noted; 0: none.
  uint64_t GenerationOf(const KeyspaceId& keyspace) const;
  void NoteGeneration(const KeyspaceId& keyspace, uint64_t generation);

  // Whether this is the process that made the keeper. May be called in a forked child.
  bool InOwnProcess() const;

 private:
  struct Return {
    std::shared_ptr<Connection> connection;
    uint64_t id = 0;  // of a lease or an Acquire, or a staging offset
  };
  struct Listening {
    PoolName pool;
    PoolListener* listener = nullptr;
  };
  struct SlotReturn {
    std::shared_ptr<Connection> connection;
    PoolId pool;
    std::vector<uint64_t> slots;
  };
  struct Pending {
    std::vector<SlotReturn> slots;
    std::vector<Return> leases;
    std::vector<Return> requests;
    std::vector<Return> rooms;
  };

  void Run();
  void Serve(const Connection& connection, SessionStream& stream);
  void Handle(const Connection& connection, const v1::SessionResponse& message);
  void NotifyDemotions(const v1::SessionResponse::Demotions& demotions);
  void NotifyConnected();
  void SendCounters(SessionStream& stream);
  void ReturnPending();
  void Enqueue(std::vector<Return> Pending::*list, std::shared_ptr<Connection> connection,
               uint64_t id);
  void BackOff();
  void SetCurrent(std::shared_ptr<Connection> connection, std::shared_ptr<SessionStream> stream);
  void NoteFailure(const absl::Status& status);
  void Wake();
  bool stopping() const;

  const ClientOptions options_;
  const pid_t pid_;
  std::minstd_rand random_;      // the thread's
  Duration backoff_;             // the thread's
  bool failure_logged_ = false;  // the thread's
  TimePoint counters_due_;       // the thread's

  mutable Mutex mutex_;
  mutable CondVar changed_;
  std::shared_ptr<Connection> current_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SessionStream> stream_ ABSL_GUARDED_BY(mutex_);
  bool attempted_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  Pending pending_ ABSL_GUARDED_BY(mutex_);
  SessionCounters counters_ ABSL_GUARDED_BY(mutex_);
  bool counted_ ABSL_GUARDED_BY(mutex_) = false;
  std::unordered_map<KeyspaceId, KeyspaceState> states_ ABSL_GUARDED_BY(mutex_);
  // The highest generations that the crumbd of this epoch named.
  std::unordered_map<KeyspaceId, uint64_t> generations_ ABSL_GUARDED_BY(mutex_);
  uint64_t generations_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  Mutex listening_;  // held while listeners are called
  std::vector<Listening> listeners_ ABSL_GUARDED_BY(listening_);
  Thread thread_;
};

}  // namespace crumb::client
