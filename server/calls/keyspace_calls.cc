// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/keyspace_calls.h"

#include <utility>

#include "common/limited_log.h"
#include "common/status_macros.h"
#include "server/base/wire_enums.h"
#include "server/calls/field_bounds.h"

namespace crumb::server {
namespace {

uint64_t GenerationOf(const CallContext& context, const KeyspaceId& id) {
  const auto keyspace = context.keyspaces.Find(id);
  return keyspace == nullptr ? 0 : keyspace->generation.load();
}

void Fill(const Keyspace& keyspace, v1::OpenKeyspaceResponse* response) {
  response->set_keyspace(std::string(keyspace.id.view()));
  response->set_generation(keyspace.generation.load());
  response->set_state(ToProto(keyspace.state.load()));
  response->set_int2_tile_bytes(keyspace.geometry.int2_tile_bytes());
  response->set_bf16_tile_bytes(keyspace.geometry.bf16_tile_bytes());
}

}  // namespace

void NotifySessions(const CallContext& context, const NoticeQueue::StateChange& change) {
  const auto keyspace = context.keyspaces.Find(change.keyspace);
  for (const auto& session : context.sessions.List()) {
    const std::string& tenant = session->engine().tenant();
    if (!tenant.empty() && (keyspace == nullptr || keyspace->tenant != tenant)) continue;
    const auto notices = session->notices();
    if (notices != nullptr && !notices->AddStateChange(change)) {
      context.metrics.notices_dropped.Add();
    }
  }
}

void OpenKeyspace(const CallContext& context, const v1::OpenKeyspaceRequest& request,
                  v1::OpenKeyspaceResponse* response, Done done) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  KeyspaceRegistry::Description description;
  description.fields.insert(request.fields().begin(), request.fields().end());
  description.geometry = {request.layers(), request.kv_heads(), request.head_dim(),
                          request.group_size()};
  description.tenant = request.tenant();
  if (context.caller.tenant != nullptr) {
    const std::string& own = context.caller.tenant->name;
    if (!request.tenant().empty() && request.tenant() != own) {
      return done(absl::InvalidArgumentError("tenant must be empty or '" + own +
                                             "', as the call's token says"));
    }
    description.tenant = own;
  }
  const absl::StatusOr<KeyspaceId> id = context.keyspaces.IdOf(description);
  if (!id.ok()) return done(id.status());
  context.metrics.quality.Cover(request.layers());
  const auto known = context.keyspaces.Find(*id);
  if (known != nullptr && known->tenant == description.tenant) {
    known->NoteUse(context.clock.Now());
    Fill(*known, response);
    return done(absl::OkStatus());
  }
  KeyspaceRegistry& keyspaces = context.keyspaces;
  RunOnControl(
      context,
      [&keyspaces, &metrics = context.metrics, description = std::move(description),
       response]() -> absl::Status {
        const auto opened = keyspaces.OpenKeyspace(description);
        if (absl::IsResourceExhausted(opened.status())) metrics.Reject(Rejection::kKeyspaces);
        CRUMB_RETURN_IF_ERROR(opened.status());
        const std::shared_ptr<Keyspace>& keyspace = *opened;
        LogInfoLimited("keyspace {} of model {} is open", keyspace->id.ToHex(), keyspace->model);
        Fill(*keyspace, response);
        return absl::OkStatus();
      },
      std::move(done));
}

void SetKeyspaceState(const CallContext& context, const v1::SetKeyspaceStateRequest& request,
                      Done done) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  const auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  if (request.state() != v1::KEYSPACE_STATE_ACTIVE && request.state() != v1::KEYSPACE_STATE_BF16) {
    return done(absl::InvalidArgumentError("state must be ACTIVE or BF16"));
  }
  const KeyspaceState state =
      request.state() == v1::KEYSPACE_STATE_BF16 ? KeyspaceState::kBf16 : KeyspaceState::kActive;
  RunOnControl(
      context,
      [context, id = (*keyspace)->id, state, &request]() -> absl::Status {
        CRUMB_RETURN_IF_ERROR(
            context.keyspaces.SetState(id, state, {request.who(), request.reason()}));
        LogWarningLimited("keyspace {} is in state {} now, set by '{}': {}", id.ToHex(),
                          state == KeyspaceState::kBf16 ? "bf16" : "active", request.who(),
                          request.reason());
        NotifySessions(context, {id, state, request.reason(), GenerationOf(context, id)});
        return absl::OkStatus();
      },
      std::move(done));
}

void DropKeyspace(const CallContext& context, const v1::DropKeyspaceRequest& request,
                  v1::DropKeyspaceResponse* response, Done done) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  const auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  RunOnControl(
      context,
      [context, id = (*keyspace)->id, response]() -> absl::Status {
        CRUMB_ASSIGN_OR_RETURN(const uint64_t generation, context.keyspaces.RaiseGeneration(id));
        // The record has the new generation: whatever comes, no older page is served again.
        const absl::StatusOr<uint64_t> pages = context.store.DropKeyspace(id, generation);
        if (const auto dropped = context.keyspaces.Find(id)) {
          NotifySessions(context, {id, dropped->state.load(), context.keyspaces.ReasonOf(id).reason,
                                   generation});
        }
        CRUMB_RETURN_IF_ERROR(pages.status());
        LogInfoLimited("keyspace {} was dropped: {} pages, generation {} now", id.ToHex(), *pages,
                       generation);
        response->set_generation(generation);
        return absl::OkStatus();
      },
      std::move(done));
}

}  // namespace crumb::server
