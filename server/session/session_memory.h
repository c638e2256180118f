// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace crumb::server {

class Session;

// Memory that processes hold beyond their staging memory and leases, for the table that ends their
// sessions. Thread-safe; calls no session table.
class SessionMemory {
 public:
  virtual ~SessionMemory() = default;
  // Whether the process may be using what others would get when its session ended.
  virtual bool Holds(const Session& session) const = 0;
  // No request is sent to the process from here on; it may live and use what it holds.
  virtual void CallsEnded(const Session& session) = 0;
  // The process is gone, or has given back all it held.
  virtual void ProcessEnded(const Session& session) = 0;
};

}  // namespace crumb::server
