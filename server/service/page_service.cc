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

grpc::ServerUnaryReactor* CacheService::OpenKeyspace(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::OpenKeyspaceRequest, v1::OpenKeyspaceResponse>(
      call, Rpc::kOpenKeyspace, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response, const Done& done) {
        server::OpenKeyspace(context, request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::SetKeyspaceState(Context* call, const Bytes* in,
                                                         Bytes* out) {
  return RespondLater<v1::SetKeyspaceStateRequest, v1::SetKeyspaceStateResponse>(
      call, Rpc::kSetKeyspaceState, {*in, *out},
      [](const CallContext& context, const auto& request, auto*, const Done& done) {
        server::SetKeyspaceState(context, request, done);
      });
}

grpc::ServerUnaryReactor* CacheService::DropKeyspace(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::DropKeyspaceRequest, v1::DropKeyspaceResponse>(
      call, Rpc::kDropKeyspace, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response, const Done& done) {
        server::DropKeyspace(context, request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Flush(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::FlushRequest, v1::FlushResponse>(
      call, Rpc::kFlush, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response, const Done& done) {
        server::Flush(context, request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Pin(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::PinRequest, v1::PinResponse>(
      call, Rpc::kPin, {*in, *out},
      [call](const CallContext& context, const auto& request, auto* response, const Done& done) {
        server::Pin(context, DeadlineOf(*call, context.clock.Now()), request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Unpin(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::UnpinRequest, v1::UnpinResponse>(
      call, Rpc::kUnpin, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response) {
        return server::Unpin(context, request, response);
      });
}

grpc::ServerUnaryReactor* CacheService::Delete(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::DeleteRequest, v1::DeleteResponse>(
      call, Rpc::kDelete, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response, const Done& done) {
        server::Delete(context, request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::Stats(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::StatsRequest, v1::StatsResponse>(
      call, Rpc::kStats, {*in, *out},
      [this](const CallContext& context, const auto&, auto* response) {
        FillStats(context, node_, response);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::ListNodes(Context* call, const Bytes* in, Bytes* out) {
  return Respond<v1::ListNodesRequest, v1::ListNodesResponse>(
      call, Rpc::kListNodes, {*in, *out},
      [this](const CallContext& context, const auto&, auto* response) {
        FillNodes(context, node_, response);
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* CacheService::LocatePage(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::LocatePageRequest, v1::LocatePageResponse>(
      call, Rpc::kLocatePage, {*in, *out},
      [](const CallContext& context, const auto& request, auto* response, const Done& done) {
        if (context.cluster == nullptr) {
          return done(absl::FailedPreconditionError("this crumbd is in no cluster"));
        }
        // A search without a keyspace would cover those of all tenants.
        if (context.caller.tenant != nullptr) {
          const auto keyspace = FindKeyspace(context, request.keyspace());
          if (!keyspace.ok()) return done(keyspace.status());
        }
        context.cluster->Locate(request, response, done);
      });
}

grpc::ServerUnaryReactor* CacheService::DrainNode(Context* call, const Bytes* in, Bytes* out) {
  return RespondLater<v1::DrainNodeRequest, v1::DrainNodeResponse>(
      call, Rpc::kDrainNode, {*in, *out},
      [](const CallContext& context, const auto& request, auto*, const Done& done) {
        if (context.cluster == nullptr) {
          return done(absl::FailedPreconditionError("this crumbd is in no cluster"));
        }
        if (context.caller.tenant != nullptr) {
          return done(absl::PermissionDeniedError("a tenant may not drain nodes"));
        }
        context.cluster->DrainNode(request.node(), done);
      });
}

}  // namespace crumb::server
