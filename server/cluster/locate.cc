// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/cluster/locate.h"

#include <utility>

#include "common/mutex.h"

namespace crumb::server {
namespace {

// Nodes without a response after this time are listed as silent: an operator waits for the result.
constexpr auto kRequestDeadline = std::chrono::seconds(1);

std::shared_ptr<Keyspace> KeyspaceOf(const LocateContext& context,
                                     const v1::LocatePageRequest& request, const PageKey& key) {
  if (!request.keyspace().empty()) {
    const auto id = KeyspaceId::FromBytes(request.keyspace());
    return id.ok() ? context.keyspaces.Find(*id) : nullptr;
  }
  for (const auto& keyspace : context.keyspaces.List()) {
    if (context.store.ParentOf(keyspace->id, key)) return keyspace;
  }
  return nullptr;
}

// The responses of all nodes, as they come.
struct Locating {
  Mutex mutex;
  size_t open ABSL_GUARDED_BY(mutex) = 0;
  v1::LocatePageResponse* response = nullptr;
  std::function<void(absl::Status)> done;
};

void RequestFromAll(const LocateContext& context, const Keyspace& keyspace, const PageKey& key,
                    v1::LocatePageResponse* response, std::function<void(absl::Status)> done) {
  const PeerTable::Peers peers = context.peers.All();
  if (peers.empty()) return done(absl::OkStatus());
  v1::PeerAcquireRequest request;
  request.set_keyspace(std::string(keyspace.id.view()));
  request.set_generation(keyspace.generation.load());
  request.mutable_range()->set_layer_end(keyspace.geometry.layers);
  request.mutable_range()->set_head_end(keyspace.geometry.kv_heads);
  request.add_runs(std::string(key.view()));
  auto locating = std::make_shared<Locating>();
  locating->response = response;
  locating->done = std::move(done);
  {
    MutexLock lock(&locating->mutex);
    locating->open = peers.size();
  }
  const TimePoint deadline = context.clock.Now() + kRequestDeadline;
  for (const auto& peer : peers) {
    peer->Acquire(request, deadline,
                  [locating, peer](const absl::StatusOr<v1::PeerAcquireResponse>& reply) {
                    {
                      MutexLock lock(&locating->mutex);
                      if (!reply.ok()) {
                        locating->response->add_silent(peer->id());
                      } else if (reply->hit_pages_size() > 0 && reply->hit_pages(0) > 0) {
                        locating->response->add_holders(peer->id());
                      }
                      if (--locating->open > 0) return;
                    }
                    locating->done(absl::OkStatus());
                  });
  }
}

}  // namespace

void LocatePage(const LocateContext& context, const v1::LocatePageRequest& request,
                v1::LocatePageResponse* response, std::function<void(absl::Status)> done) {
  const auto key = PageKey::FromBytes(request.key());
  if (!key.ok()) return done(absl::InvalidArgumentError("key must have 32 bytes"));
  const auto keyspace = KeyspaceOf(context, request, *key);
  if (keyspace == nullptr) {
    return done(absl::NotFoundError(
        "no keyspace was named, or an unknown one, and this node does not hold the page"));
  }
  response->set_keyspace(std::string(keyspace->id.view()));
  PageKey run;
  if (!request.run().empty()) {
    const auto named = PageKey::FromBytes(request.run());
    if (!named.ok()) return done(absl::InvalidArgumentError("run must have 32 bytes"));
    run = *named;
  } else if (const auto parent = context.store.ParentOf(keyspace->id, *key)) {
    FragmentHeader header;
    header.keyspace = keyspace->id;
    header.key = *key;
    header.parent = *parent;
    run = context.runs.Find(header).value_or(PageKey());
  }
  if (run != PageKey()) {
    response->set_run(std::string(run.view()));
    const PeerTable::Homes homes = context.peers.HomesOfRun(run);
    for (const std::string& id : homes.current) response->add_homes(id);
    for (const std::string& id : homes.previous) response->add_previous_homes(id);
  }
  if (context.store.ParentOf(keyspace->id, *key)) response->add_holders(context.self);
  RequestFromAll(context, *keyspace, *key, response, std::move(done));
}

}  // namespace crumb::server
