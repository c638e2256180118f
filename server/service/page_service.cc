// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
// CacheService: the calls about keyspaces, pages and the node.
#include "server/calls/keyspace_calls.h"
#include "server/calls/page_calls.h"
#include "server/calls/status_calls.h"
#include "server/cluster/cluster.h"
#include "server/service/cache_service.h"

namespace crumb::server {

grpc::ServerUnaryReactor* CacheService::OpenKeyspace(Context* call,
                                                     const v1::OpenKeyspaceRequest* request,
                                                     v1::OpenKeyspaceResponse* response) {
  return AnswerLater(call, Rpc::kOpenKeyspace, [&](const Done& done) {
    server::OpenKeyspace(context_, *request, response, done);
  });
}

grpc::ServerUnaryReactor* CacheService::SetKeyspaceState(Context* call,
                                                         const v1::SetKeyspaceStateRequest* request,
                                                         v1::SetKeyspaceStateResponse*) {
  return AnswerLater(call, Rpc::kSetKeyspaceState,
                     [&](const Done& done) { server::SetKeyspaceState(context_, *request, done); });
}

grpc::ServerUnaryReactor* CacheService::DropKeyspace(Context* call,
                                                     const v1::DropKeyspaceRequest* request,
                                                     v1::DropKeyspaceResponse* response) {
  return AnswerLater(call, Rpc::kDropKeyspace, [&](const Done& done) {
    server::DropKeyspace(context_, *request, response, done);
  });
}

grpc::ServerUnaryReactor* CacheService::Flush(Context* call, const v1::FlushRequest*,
                                              v1::FlushResponse* response) {
  return AnswerLater(call, Rpc::kFlush,
                     [&](const Done& done) { server::Flush(context_, response, done); });
}

grpc::ServerUnaryReactor* CacheService::Pin(Context* call, const v1::PinRequest* request,
                                            v1::PinResponse* response) {
  return Answer(call, Rpc::kPin, [&] { return server::Pin(context_, *request, response); });
}

grpc::ServerUnaryReactor* CacheService::Unpin(Context* call, const v1::UnpinRequest* request,
                                              v1::UnpinResponse* response) {
  return Answer(call, Rpc::kUnpin, [&] { return server::Unpin(context_, *request, response); });
}

grpc::ServerUnaryReactor* CacheService::Delete(Context* call, const v1::DeleteRequest* request,
                                               v1::DeleteResponse* response) {
  return AnswerLater(call, Rpc::kDelete,
                     [&](const Done& done) { server::Delete(context_, *request, response, done); });
}

grpc::ServerUnaryReactor* CacheService::Stats(Context* call, const v1::StatsRequest*,
                                              v1::StatsResponse* response) {
  return Answer(call, Rpc::kStats, [&] {
    FillStats(context_, node_, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheService::ListNodes(Context* call, const v1::ListNodesRequest*,
                                                  v1::ListNodesResponse* response) {
  return Answer(call, Rpc::kListNodes, [&] {
    FillNodes(context_, node_, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* CacheService::LocatePage(Context* call,
                                                   const v1::LocatePageRequest* request,
                                                   v1::LocatePageResponse* response) {
  return AnswerLater(call, Rpc::kLocatePage, [&](const Done& done) {
    if (context_.cluster == nullptr) {
      return done(absl::FailedPreconditionError("this crumbd is in no cluster"));
    }
    context_.cluster->Locate(*request, response, done);
  });
}

grpc::ServerUnaryReactor* CacheService::DrainNode(Context* call,
                                                  const v1::DrainNodeRequest* request,
                                                  v1::DrainNodeResponse*) {
  return AnswerLater(call, Rpc::kDrainNode, [&](const Done& done) {
    if (context_.cluster == nullptr) {
      return done(absl::FailedPreconditionError("this crumbd is in no cluster"));
    }
    context_.cluster->DrainNode(request->node(), done);
  });
}

}  // namespace crumb::server
