// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "client/rpc/pending_call.h"
#include "common/clock.h"
#include "crumb/client_options.h"
#include "crumb/v1/cache_service.pb.h"

namespace crumb::client {

// Properties of every call.
struct CallContext {
  std::string_view session;  // token in hexadecimal; empty: none
  TimePoint deadline;
};

// SessionStream is the session stream of one connection. Wait, Send and Flush belong to one thread;
// any thread may call Wake, also after the stream has ended.
class SessionStream {
 public:
  enum class Event { kMessage, kClosed, kWoken, kTimeout };

  virtual ~SessionStream() = default;

  // Sleeps until something happens, and fills in `message` for kMessage. kClosed is final.
  virtual Event Wait(TimePoint deadline, v1::SessionResponse* message) = 0;
  // Returns false and sends nothing while the previous message is being sent.
  virtual bool Send(const v1::SessionRequest& request) = 0;
  // Blocks until no message is being sent, the stream has closed, or `deadline` has passed.
  virtual void Flush(TimePoint deadline) = 0;
  // Makes a Wait return kWoken.
  virtual void Wake() = 0;
};

// RpcStub is crumbd's service over gRPC, and the only part of the client that depends on gRPC.
// Calls block until their deadline at most. Thread-safe.
//
// Errors have crumbd's code and message, except that an unknown session (UNAUTHENTICATED) becomes
// kUnavailable: it belongs to an earlier crumbd, and reconnecting helps. Messages have at most 64
// MiB each way.
class RpcStub {
 public:
  // Returns false in a forked child of a process that has used gRPC: gRPC's threads exist in the
  // parent only, and calls would never return.
  static bool Usable();

  // Connects to `target`, which is "unix:PATH" or "HOST:PORT", without waiting. Uses the token in
  // `options` and, over TCP, the TLS files, which must have been checked and are reloaded when they
  // change. REQUIRES: Usable().
  static std::unique_ptr<RpcStub> Connect(const std::string& target, const ClientOptions& options);

  virtual ~RpcStub() = default;

  // Returns false if there is no connection by `deadline`.
  virtual bool WaitConnected(TimePoint deadline) = 0;
  virtual bool connected() = 0;

  virtual absl::Status Call(const CallContext&, const v1::OpenKeyspaceRequest&,
                            v1::OpenKeyspaceResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::SetKeyspaceStateRequest&,
                            v1::SetKeyspaceStateResponse*) = 0;
  // Sends the request and returns without waiting. The response must outlive the result.
  virtual std::unique_ptr<PendingCall> Start(const CallContext&, const v1::AcquireRequest&,
                                             v1::AcquireResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::LookupRequest&, v1::LookupResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ReleaseRequest&,
                            v1::ReleaseResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ReserveRequest&,
                            v1::ReserveResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::CommitRequest&, v1::CommitResponse*) = 0;
  virtual std::unique_ptr<PendingCall> Start(const CallContext&, const v1::CommitRequest&,
                                             v1::CommitResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::AbortRequest&, v1::AbortResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ClaimSlotsRequest&,
                            v1::ClaimSlotsResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ScrubSlotsRequest&,
                            v1::ScrubSlotsResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::FlushRequest&, v1::FlushResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::PrefetchRequest&,
                            v1::PrefetchResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::PinRequest&, v1::PinResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::UnpinRequest&, v1::UnpinResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::DeleteRequest&, v1::DeleteResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::DropKeyspaceRequest&,
                            v1::DropKeyspaceResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::StatsRequest&, v1::StatsResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ListNodesRequest&,
                            v1::ListNodesResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::LocatePageRequest&,
                            v1::LocatePageResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::DrainNodeRequest&,
                            v1::DrainNodeResponse*) = 0;

  // Passes every message to `receive`, whose error ends the call and is returned.
  virtual absl::Status Get(const CallContext&, const v1::GetRequest&,
                           const std::function<absl::Status(v1::GetResponse&)>& receive) = 0;
  // Sends the messages that `next` fills in until it returns false.
  virtual absl::Status Put(const CallContext&, const std::function<bool(v1::PutRequest*)>& next,
                           v1::PutResponse*) = 0;

  virtual std::shared_ptr<SessionStream> OpenSession(std::string_view session) = 0;
};

}  // namespace crumb::client
