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
  // Whether the process may still be using memory that others would get if its session ended.
  virtual bool Holds(const Session& session) const = 0;
  // Records that no request is sent to the process from here on. It may live and use the memory
  // that it holds.
  virtual void CallsEnded(const Session& session) = 0;
  // Records that the process has ended, or has released everything that it held.
  virtual void ProcessEnded(const Session& session) = 0;
};

}  // namespace crumb::server
