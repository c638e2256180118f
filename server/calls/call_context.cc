// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/call_context.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "common/status_macros.h"
#include "fmt/format.h"

namespace crumb::server {

absl::StatusOr<std::shared_ptr<Keyspace>> FindKeyspace(const CallContext& context,
                                                       const std::string& id) {
  const absl::StatusOr<KeyspaceId> keyspace_id = KeyspaceId::FromBytes(id);
  if (!keyspace_id.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("keyspace has {} bytes, must have {}", id.size(), sizeof(KeyspaceId)));
  }
  auto keyspace = context.keyspaces.Find(*keyspace_id);
  if (keyspace == nullptr || !MaySee(context, *keyspace)) {
    return absl::NotFoundError("unknown keyspace " + keyspace_id->ToHex() + ": open it first");
  }
  keyspace->NoteUse(context.clock.Now());
  return keyspace;
}

bool MaySee(const CallContext& context, const Keyspace& keyspace) {
  return context.caller.tenant == nullptr || keyspace.tenant == context.caller.tenant->name;
}

storage::FlushScope FlushScopeOf(const CallContext& context) {
  if (context.caller.tenant == nullptr) return std::nullopt;
  return context.caller.tenant->name;
}

uint64_t BytesOfTenant(const KeyspaceRegistry& keyspaces, const storage::TieredStore& store,
                       const std::string& tenant) {
  uint64_t bytes = 0;
  for (const auto& keyspace : keyspaces.ListOf(tenant)) {
    bytes += store.KeyspaceBytes(keyspace->id);
  }
  return bytes;
}

absl::StatusOr<std::vector<PageKey>> ReadKeys(const CallContext& context, const std::string& keys,
                                              Repeats repeats) {
  static_assert(sizeof(PageKey) == 32 && std::is_trivially_copyable_v<PageKey>);
  if (keys.empty() || keys.size() % sizeof(PageKey) != 0) {
    return absl::InvalidArgumentError(fmt::format(
        "keys has {} bytes, must have a multiple of {} and not 0", keys.size(), sizeof(PageKey)));
  }
  const size_t count = keys.size() / sizeof(PageKey);
  if (count > static_cast<size_t>(context.limits.acquire_keys_max)) {
    return absl::InvalidArgumentError(
        fmt::format("keys holds {} page keys, limits.acquire_keys_max allows {}", count,
                    context.limits.acquire_keys_max));
  }
  std::vector<PageKey> read(count);
  std::memcpy(read.data(), keys.data(), keys.size());
  const auto duplicate =
      repeats == Repeats::kAllowed ? std::nullopt : FindDuplicate(std::span(std::as_const(read)));
  if (duplicate) {
    return absl::InvalidArgumentError(fmt::format(
        "keys: number {} repeats an earlier one, each page may be named once", *duplicate));
  }
  return read;
}

TimePoint WaitUntil(const CallContext& context, uint64_t wait_ms, TimePoint deadline) {
  const auto bound = std::chrono::duration_cast<std::chrono::milliseconds>(context.limits.wait_max);
  const auto wait =
      std::chrono::milliseconds(std::min(wait_ms, static_cast<uint64_t>(bound.count())));
  return std::min(context.clock.Now() + wait, deadline);
}

EventHub::Options EventBoundsOf(const Limits& limits, int64_t part_max_percent) {
  return {
      .watchers_max = static_cast<size_t>(limits.watchers_max),
      .durable_waits_max = static_cast<size_t>(limits.durable_waits_max),
      .part_max_percent = part_max_percent,
      .durable_waits_per_page_max = static_cast<size_t>(limits.durable_waits_per_page_max),
      .snapshot_pages_max = static_cast<size_t>(limits.watch_snapshot_total_pages_max),
      .notice_bytes_max = limits.notice_bytes_max.value,
  };
}

void RunInTurn(const CallContext& context, size_t request_bytes, std::function<void()> work,
               const Done& refused) {
  if (context.large_calls == nullptr || request_bytes <= kSmallRequestBytesMax) return work();
  if (context.large_calls->Submit(context.caller.name(), std::move(work))) return;
  context.metrics.Reject(Rejection::kLargeCallQueue);
  refused(absl::ResourceExhaustedError(
      "limits.large_call_queue, or the tenant's part of it, is reached, try again"));
}

void RunOnControl(const CallContext& context, std::function<absl::Status()> work, Done done) {
  const TimePoint queued_at = context.clock.Now();
  // Shared, because a refused task is destroyed without having run.
  const auto shared_done = std::make_shared<Done>(std::move(done));
  const bool queued = context.control.Submit(
      context.caller.name(), [context, queued_at, work = std::move(work), shared_done] {
        context.metrics.stages.of(Stage::kControlQueue)
            .Observe(SecondsBetween(queued_at, context.clock.Now()));
        (*shared_done)(work());
      });
  if (queued) return;
  context.metrics.Reject(Rejection::kControlQueue);
  (*shared_done)(absl::ResourceExhaustedError(
      "limits.control_queue, or the tenant's part of it, is reached, try again"));
}

}  // namespace crumb::server
