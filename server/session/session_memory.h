// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::server {

class Session;

// Memory that processes hold beyond their staging memory and leases: the slots of device pools
// (DevicePools implements this). SessionTable consults it before it ends a disconnected session,
// and notifies it when a session loses its connection or ends.
//
// Thread-safe. Implementations must not call the session table, because Holds is called while the
// table's lock is held; the other two functions are called without it.
class SessionMemory {
 public:
  virtual ~SessionMemory() = default;
  // Returns whether the process may still be using memory that other processes would get if its
  // session ended. Must not block.
  virtual bool Holds(const Session& session) const = 0;
  // Records that no request is sent to the process from here on, because it closed its connection
  // or its stream ended. It may live on and use the memory that it holds. May be called several
  // times for one session.
  virtual void CallsEnded(const Session& session) = 0;
  // Records that the process has ended, or has released everything that it held. All of its memory
  // may be given to other processes. Called once for each session, after its phase is kEnded.
  virtual void ProcessEnded(const Session& session) = 0;
};

}  // namespace crumb::server
