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

// What goes with every call.
struct CallContext {
  std::string_view session;  // hexadecimal token; empty: none
  TimePoint deadline;
};

// The session stream of one connection. Wait, Send and Flush belong to one thread; Wake may be
// called by any, also after the stream has ended.
class SessionStream {
 public:
  enum class Event { kMessage, kClosed, kWoken, kTimeout };

  virtual ~SessionStream() = default;

  // Sleeps until something happens; fills `message` for kMessage. After kClosed nothing comes.
  virtual Event Wait(TimePoint deadline, v1::SessionResponse* message) = 0;
  // False, and nothing is sent, while the message before is still on its way.
  virtual bool Send(const v1::SessionRequest& request) = 0;
  // Waits until nothing is on its way, the stream has closed, or `deadline`.
  virtual void Flush(TimePoint deadline) = 0;
  // Ends a Wait.
  virtual void Wake() = 0;
};

// crumbd's service over gRPC: the only place of the client that knows gRPC. Thread-safe. Calls
// block until their deadline at most.
class RpcStub {
 public:
  // False in a forked child of a process that has used gRPC: its threads and pollers exist in the
  // parent only, and calls would wait for ever.
  static bool Usable();

  // `target`: "unix:PATH" or "HOST:PORT"; of `options` the token counts, and over TCP the TLS
  // files, which have been checked and are looked at again. Does not wait. Only where Usable().
  static std::unique_ptr<RpcStub> Connect(const std::string& target, const ClientOptions& options);

  virtual ~RpcStub() = default;

  // False: no connection by `deadline`.
  virtual bool WaitConnected(TimePoint deadline) = 0;
  virtual bool connected() = 0;

  virtual absl::Status Call(const CallContext&, const v1::OpenKeyspaceRequest&,
                            v1::OpenKeyspaceResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::SetKeyspaceStateRequest&,
                            v1::SetKeyspaceStateResponse*) = 0;
  // Sends and returns. The answer's place must outlive the result.
  virtual std::unique_ptr<PendingCall> Start(const CallContext&, const v1::AcquireRequest&,
                                             v1::AcquireResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::LookupRequest&, v1::LookupResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ReleaseRequest&,
                            v1::ReleaseResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::ReserveRequest&,
                            v1::ReserveResponse*) = 0;
  virtual absl::Status Call(const CallContext&, const v1::CommitRequest&, v1::CommitResponse*) = 0;
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

  // Hands every message to `receive`; its error ends the call and is returned.
  virtual absl::Status Get(const CallContext&, const v1::GetRequest&,
                           const std::function<absl::Status(v1::GetResponse&)>& receive) = 0;
  // Sends what `next` fills in until it returns false.
  virtual absl::Status Put(const CallContext&, const std::function<bool(v1::PutRequest*)>& next,
                           v1::PutResponse*) = 0;

  virtual std::shared_ptr<SessionStream> OpenSession(std::string_view session) = 0;
};

}  // namespace crumb::client
