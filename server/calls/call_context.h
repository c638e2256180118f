// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/clock.h"
#include "common/executor.h"
#include "server/base/limits.h"
#include "server/events/event_hub.h"
#include "server/keyspaces/keyspace_registry.h"
#include "server/metrics/server_metrics.h"
#include "server/session/session_table.h"
#include "server/tenants/tenant_quotas.h"
#include "server/tenants/tenant_table.h"
#include "storage/tiered_store.h"

// The RPCs' work, without gRPC: messages in, messages and a status out. Nothing here blocks; work
// that takes time goes to an executor and calls back.
namespace crumb::server {

class Cluster;
class DevicePools;
class PrefetchBudget;

// Called exactly once, possibly before the call that takes it returns.
using Done = std::function<void(absl::Status)>;

// The parts that calls work on; all outlive every call.
// The parts of the server that a call works with. The daemon makes one; each call has a copy with
// its own `caller`, so tasks may keep it by value.
struct CallContext {
  const Limits& limits;
  Clock& clock;
  storage::TieredStore& store;
  KeyspaceRegistry& keyspaces;
  SessionTable& sessions;
  EventHub& events;
  ServerMetrics& metrics;
  Executor& commits;                     // copies and checksums
  Executor& control;                     // runs tasks that write records or walk the index
  Cluster* cluster = nullptr;            // null: this node is alone
  const TenantTable* tenants = nullptr;  // null: callers need no token
  Caller caller;                         // the caller of this call
  DevicePools* pools = nullptr;          // null: this node keeps none
  PrefetchBudget* prefetches = nullptr;  // null: no bound
  TenantQuotas* quotas = nullptr;        // null: tenants have none
  // Percentage of every budget that one tenant may have (TenantBudget).
  int64_t part_max_percent = 100;
  Executor* large_calls = nullptr;  // null: RunInTurn runs them at once
};

// The keyspace that a request names. kInvalidArgument: not 32 bytes; kNotFound: unknown, or another
// tenant's, with the same message. Notes that the keyspace is in use, so it is not ended as idle.
absl::StatusOr<std::shared_ptr<Keyspace>> FindKeyspace(const CallContext& context,
                                                       const std::string& id);

// Whether a field may name a page key more than once: where keys are a prefix of a sequence it may
// not, because a response has as many entries as its request.
enum class Repeats : uint8_t { kRefused, kAllowed };

// Returns the page keys of a request's field, 32 bytes each. kInvalidArgument: no keys, a length
// that is no multiple of 32, more than limits.acquire_keys_max, or a key that is there twice.
absl::StatusOr<std::vector<PageKey>> ReadKeys(const CallContext& context, const std::string& keys,
                                              Repeats repeats = Repeats::kRefused);

// Returns whether the caller may know of the keyspace: it is its tenant's, or the caller has no
// tenant.
bool MaySee(const CallContext& context, const Keyspace& keyspace);

// Returns the keyspaces that the caller's Flush reports on: those that MaySee is true for.
storage::FlushScope FlushScopeOf(const CallContext& context);

// Returns the bytes of the tenant's pages in all tiers of this node. Costs a read of the store for
// each of the tenant's keyspaces.
uint64_t BytesOfTenant(const KeyspaceRegistry& keyspaces, const storage::TieredStore& store,
                       const std::string& tenant);

// Returns the time until which a call waits for lower tiers: `wait_ms` from now, no later than
// `deadline` nor than limits.wait_max from now.
TimePoint WaitUntil(const CallContext& context, uint64_t wait_ms, TimePoint deadline);

// Returns the bounds of the EventHub that calls use.
EventHub::Options EventBoundsOf(const Limits& limits, int64_t part_max_percent);

// Bytes of a small request: it names 256 pages at most, whose look-up takes some 30 us, about as
// long as gRPC's own work for a call.
inline constexpr size_t kSmallRequestBytesMax = 8'192 + 512;

// Runs the work of a call, whose cost grows with the bytes of its request: at once if the request
// is small or there are no tenants, and else on the threads for large calls, which take one call of
// each tenant in rotation. So the calls of a tenant wait for one call of every other tenant at
// most. Calls `refused`, and not `work`, with kResourceExhausted if limits.large_call_queue is
// reached.
void RunInTurn(const CallContext& context, size_t request_bytes, std::function<void()> work,
               const Done& refused);

// Runs `work` on the control executor, in the caller's place of its queue; kResourceExhausted at
// once when its queue is full. `done` gets the status that `work` returns, on the executor's
// thread.
void RunOnControl(const CallContext& context, std::function<absl::Status()> work, Done done);

}  // namespace crumb::server
