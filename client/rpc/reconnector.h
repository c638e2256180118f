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

// Maintains one connection to crumbd: opens it, reads its session stream, opens another one when it
// is lost, and returns leases and staging room to crumbd in the background. Its thread sleeps
// while nothing happens. Thread-safe. A forked child may only call the methods that say so.
//
// The thread ("crumb-client"):
//     connect --fails--> back off (backoff_min, doubling up to backoff_max, half of it random)
//     connect --succeeds--> serve: notices in, counters and returns out --stream ends--> connect
//
// Everything that was granted over a connection is returned over the same connection, in calls of
// at most 1,024 entries and 500 ms. A call that fails is not repeated, because crumbd frees
// everything when the session ends. After Stop, returns are sent by the thread that destroys the
// last reference.
//
// Remembers the states and generations of up to 4,096 keyspaces. A new epoch clears the
// generations.
class Reconnector {
 public:
  explicit Reconnector(const ClientOptions& options);
  ~Reconnector();

  // Starts the thread and blocks until its first attempt to connect has ended.
  void Start();
  // Returns pending leases and room, closes the connection and joins the thread. Idempotent.
  void Stop();

  // Returns null if there is no connection now.
  std::shared_ptr<Connection> current() const;
  // Returns null if there is no connection by `deadline`.
  std::shared_ptr<Connection> Wait(TimePoint deadline) const;

  // ReleaseLater returns a lease, and AbortLater staging room, in the background. In a forked child
  // they do nothing, because leases and room belong to the parent.
  void ReleaseLater(std::shared_ptr<Connection> connection, uint64_t lease);
  // `reserve` is the number of the Reserve that returned the room.
  void AbortLater(std::shared_ptr<Connection> connection, uint64_t offset, uint64_t reserve);
  // Returns the lease of an Acquire whose response did not arrive, if crumbd granted one.
  void ForgetLater(std::shared_ptr<Connection> connection, uint64_t request);

  // Returns the room of a Reserve whose response did not arrive, now or once crumbd grants it.
  void GiveUpReserveLater(std::shared_ptr<Connection> connection, uint64_t reserve);

  // Returns slots of a device pool in the background.
  void ReleaseSlotsLater(std::shared_ptr<Connection> connection, const PoolId& pool,
                         std::span<const uint64_t> slots);

  // Calls `listener` for connections and demotions, on the reconnector's thread, until
  // StopListening has returned. See PoolLink::Listen.
  absl::Status Listen(const PoolName& pool, PoolListener* listener);
  void StopListening(PoolListener* listener);

  Duration call_timeout() const { return options_.call_timeout; }

  // Adds amounts to the next report. Wakes the thread for the first amount only, so that counting
  // is cheap.
  void Count(const SessionCounters& amounts);

  // Returns the latest state of a notice or NoteState; kUnknown: there was none.
  KeyspaceState StateOf(const KeyspaceId& keyspace) const;
  void NoteState(const KeyspaceId& keyspace, KeyspaceState state);
  // Returns the highest generation that NoteGeneration was called with; 0: none.
  uint64_t GenerationOf(const KeyspaceId& keyspace) const;
  void NoteGeneration(const KeyspaceId& keyspace, uint64_t generation);

  // Returns whether this process created the reconnector. May be called in a forked child.
  bool InOwnProcess() const;

 private:
  struct Return {
    std::shared_ptr<Connection> connection;
    uint64_t id = 0;       // a lease, the number of an Acquire or Reserve, or a staging offset
    uint64_t reserve = 0;  // number of the Reserve that returned the offset
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
    std::vector<Return> reserves;
  };

  void Run();
  void Serve(const Connection& connection, SessionStream& stream);
  void Handle(const Connection& connection, const v1::SessionResponse& message);
  void NotifyDemotions(const v1::SessionResponse::Demotions& demotions);
  void NotifyConnected();
  void SendCounters(SessionStream& stream);
  void ReturnPending();
  void Enqueue(std::vector<Return> Pending::*list, std::shared_ptr<Connection> connection,
               uint64_t id, uint64_t reserve = 0);
  void BackOff();
  void SetCurrent(std::shared_ptr<Connection> connection, std::shared_ptr<SessionStream> stream);
  void NoteFailure(const absl::Status& status);
  void Wake();
  bool stopping() const;

  const ClientOptions options_;
  const pid_t pid_;
  std::minstd_rand random_;      // used by the thread only
  Duration backoff_;             // used by the thread only
  bool failure_logged_ = false;  // used by the thread only
  TimePoint counters_due_;       // used by the thread only

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
  // The highest generations that crumbd has named since it had generations_epoch_.
  std::unordered_map<KeyspaceId, uint64_t> generations_ ABSL_GUARDED_BY(mutex_);
  uint64_t generations_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  Mutex listening_;  // held while listeners are called
  std::vector<Listening> listeners_ ABSL_GUARDED_BY(listening_);
  Thread thread_;
};

}  // namespace crumb::client
