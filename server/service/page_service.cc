// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// CacheService: the calls about keyspaces, pages and the node.
#include "server/calls/keyspace_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/status_calls.h"
#include "server/cluster/cluster.h"
#include "server/service/cache_service.h"
#include "server/service/call_metadata.h"

namespace crumb::server {

grpc::ServerUnaryReactor* CacheService::OpenKeyspace(Context* call,
                                                     const v1::OpenKeyspaceRequest* request,
                                                     v1::OpenKeyspaceResponse* response) {
  return RespondLater(call, Rpc::kOpenKeyspace, *request, response,
                      [=](const CallContext& context, const Done& done) {
                        server::OpenKeyspace(context, *request, response, done);
                      });
}

grpc::ServerUnaryReactor* CacheService::SetKeyspaceState(Context* call,
                                                         const v1::SetKeyspaceStateRequest* request,
                                                         v1::SetKeyspaceStateResponse* response) {
  return RespondLater(call, Rpc::kSetKeyspaceState, *request, response,
                      [=](const CallContext& context, const Done& done) {
                        server::SetKeyspaceState(context, *request, done);
                      });
}

grpc::ServerUnaryReactor* CacheService::DropKeyspace(Context* call,
                                                     const v1::DropKeyspaceRequest* request,
                                                     v1::DropKeyspaceResponse* response) {
  return RespondLater(call, Rpc::kDropKeyspace, *request, response,
                      [=](const CallContext& context, const Done& done) {
                        server::DropKeyspace(context, *request, response, done);
                      });
}

grpc::ServerUnaryReactor* CacheService::Flush(Context* call, const v1::FlushRequest* request,
                                              v1::FlushResponse* response) {
  return RespondLater(call, Rpc::kFlush, *request, response,
                      [=](const CallContext& context, const Done& done) {
                        server::Flush(context, *request, response, done);
                      });
}

grpc::ServerUnaryReactor* CacheService::Pin(Context* call, const v1::PinRequest* request,
                                            v1::PinResponse* response) {
  return RespondLater(
      call, Rpc::kPin, *request, response, [=](const CallContext& context, const Done& done) {
        server::Pin(context, DeadlineOf(*call, context.clock.Now()), *request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Unpin(Context* call, const v1::UnpinRequest* request,
                                              v1::UnpinResponse* response) {
  return Respond(call, Rpc::kUnpin, *request, response, [=](const CallContext& context) {
    return server::Unpin(context, *request, response);
  });
}

grpc::ServerUnaryReactor* CacheService::Delete(Context* call, const v1::DeleteRequest* request,
                                               v1::DeleteResponse* response) {
  return RespondLater(call, Rpc::kDelete, *request, response,
                      [=](const CallContext& context, const Done& done) {
                        server::Delete(context, *request, response, done);
                      });
}

grpc::ServerUnaryReactor* CacheService::Stats(Context* call, const v1::StatsRequest* request,
                                              v1::StatsResponse* response) {
  return Respond(call, Rpc::kStats, *request, response, [=, this](const CallContext& context) {
    FillStats(context, node_, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheService::ListNodes(Context* call,
                                                  const v1::ListNodesRequest* request,
                                                  v1::ListNodesResponse* response) {
  return Respond(call, Rpc::kListNodes, *request, response, [=, this](const CallContext& context) {
    FillNodes(context, node_, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheService::LocatePage(Context* call,
                                                   const v1::LocatePageRequest* request,
                                                   v1::LocatePageResponse* response) {
  return RespondLater(
      call, Rpc::kLocatePage, *request, response,
      [=](const CallContext& context, const Done& done) {
        if (context.cluster == nullptr) {
          return done(absl::FailedPreconditionError("this crumbd is in no cluster"));
        }
        // A search without a keyspace would cover those of all tenants.
        if (context.caller.tenant != nullptr) {
          const auto keyspace = FindKeyspace(context, request->keyspace());
          if (!keyspace.ok()) return done(keyspace.status());
        }
        context.cluster->Locate(*request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::DrainNode(Context* call,
                                                  const v1::DrainNodeRequest* request,
                                                  v1::DrainNodeResponse* response) {
  return RespondLater(
      call, Rpc::kDrainNode, *request, response, [=](const CallContext& context, const Done& done) {
        if (context.cluster == nullptr) {
          return done(absl::FailedPreconditionError("this crumbd is in no cluster"));
        }
        if (context.caller.tenant != nullptr) {
          return done(absl::PermissionDeniedError("a tenant may not drain nodes"));
        }
        context.cluster->DrainNode(request->node(), done);
      });
}

}  // namespace crumb::server
