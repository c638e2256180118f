// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/calls/page_calls.h"

#include <optional>
#include <utility>

#include "common/status_macros.h"
#include "fmt/format.h"
#include "server/calls/field_bounds.h"
#include "server/calls/store_request.h"
#include "server/cluster/cluster.h"

namespace crumb::server {

namespace {

absl::StatusOr<Duration> TtlOf(const CallContext& context, const v1::PinRequest& request) {
  const auto bound =
      std::chrono::duration_cast<std::chrono::milliseconds>(context.limits.pin_max).count();
  if (request.ttl_ms() == 0 || request.ttl_ms() > static_cast<uint64_t>(bound)) {
    return absl::InvalidArgumentError(
        fmt::format("ttl_ms is {}, must be from 1 to limits.pin_max, {}", request.ttl_ms(), bound));
  }
  return std::chrono::milliseconds(request.ttl_ms());
}

// Pins the pages that are there, in order, until the tenant holds its part of the memory that may
// be kept from eviction. kResourceExhausted then, naming how many are pinned.
absl::Status PinPages(const CallContext& context, const Keyspace& keyspace,
                      std::span<const PageKey> keys, TimePoint until, v1::PinResponse* response) {
  uint32_t pinned = 0;
  for (const PageKey& key : keys) {
    // Pages that only devices have are in pools of the tenant's own.
    if (context.tenants != nullptr && context.store.PageBytes(keyspace.id, key) == 0) continue;
    const absl::StatusOr<uint32_t> there = context.store.Pin(keyspace.id, {&key, 1}, until);
    if (!there.ok()) {
      context.metrics.Reject(Rejection::kHeldMemory, TenantBudget::Taken::kPartFull);
      return absl::ResourceExhaustedError(fmt::format("{} of {} pages are pinned: {}", pinned,
                                                      keys.size(),
                                                      std::string(there.status().message())));
    }
    pinned += *there;
  }
  response->set_pinned_pages(pinned);
  return absl::OkStatus();
}

}  // namespace

void Pin(const CallContext& context, TimePoint deadline, const v1::PinRequest& request,
         v1::PinResponse* response, Done done) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  const auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  auto wanted = MakeStoreRequest(context, **keyspace, request, request.wait_ms(), deadline);
  if (!wanted.ok()) return done(wanted.status());
  const auto ttl = TtlOf(context, request);
  if (!ttl.ok()) return done(ttl.status());
  const auto pin = [context, response, ttl = *ttl, keyspace = *keyspace, keys = wanted->keys] {
    return PinPages(context, *keyspace, keys, context.clock.Now() + ttl, response);
  };
  const bool waits = request.wait_ms() > 0 && (*keyspace)->serves();
  if (context.cluster == nullptr || !waits) {
    return done(pin());
  }
  // The pages are leased until they are pinned, so that they are not evicted before.
  AcquireAnywhere(
      context, MakeClusterRequest(*keyspace, *std::move(wanted), request),
      [context, pin, done = std::move(done)](const absl::StatusOr<storage::AcquireResult>& result) {
        const absl::Status pinned = pin();
        if (result.ok() && result->lease != 0) context.store.Release(result->lease);
        done(pinned);
      });
}

absl::Status Unpin(const CallContext& context, const v1::UnpinRequest& request,
                   v1::UnpinResponse* response) {
  CRUMB_RETURN_IF_ERROR(CheckFields(context.limits, request));
  CRUMB_ASSIGN_OR_RETURN(const auto keyspace, FindKeyspace(context, request.keyspace()));
  CRUMB_ASSIGN_OR_RETURN(const std::vector<PageKey> keys, ReadKeys(context, request.keys()));
  response->set_unpinned_pages(context.store.Unpin(keyspace->id, keys));
  return absl::OkStatus();
}

void Delete(const CallContext& context, const v1::DeleteRequest& request,
            v1::DeleteResponse* response, Done done) {
  const absl::Status fits = CheckFields(context.limits, request);
  if (!fits.ok()) return done(fits);
  const auto keyspace = FindKeyspace(context, request.keyspace());
  if (!keyspace.ok()) return done(keyspace.status());
  auto keys = ReadKeys(context, request.keys());
  if (!keys.ok()) return done(keys.status());
  RunOnControl(
      context,
      [context, id = (*keyspace)->id, keys = *std::move(keys), response]() -> absl::Status {
        const absl::StatusOr<uint32_t> deleted = context.store.Delete(id, keys);
        if (deleted.ok()) response->set_deleted_pages(*deleted);
        // Other nodes delete the pages whether this one can note it or not.
        if (context.cluster != nullptr) {
          CRUMB_RETURN_IF_ERROR(context.cluster->NoteDeletion(id, keys));
        }
        return deleted.status();
      },
      std::move(done));
}

void Flush(const CallContext& context, const v1::FlushRequest& request, v1::FlushResponse* response,
           Done done) {
  const TimePoint started = context.clock.Now();
  std::optional<uint64_t> since;
  if (request.has_since()) since = request.since();
  context.store.Flush(FlushScopeOf(context), since,
                      [context, started, response, report = request.report(),
                       done = std::move(done)](const FlushReport& found) {
                        context.metrics.stages.of(Stage::kFlush)
                            .Observe(SecondsBetween(started, context.clock.Now()));
                        response->set_durable_pages(found.durable_pages);
                        response->set_tier_off_pages(found.tier_off_pages);
                        response->set_no_room_pages(found.no_room_pages);
                        response->set_lost_pages(found.lost_pages);
                        response->set_unread_pages(found.unread_pages);
                        response->set_why(found.why);
                        response->set_mark(found.mark);
                        done(report ? found.failed : found.ToStatus());
                      });
}

}  // namespace crumb::server
