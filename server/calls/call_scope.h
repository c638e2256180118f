// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "common/clock.h"
#include "common/tenant_budget.h"
#include "google/protobuf/message.h"
#include "server/calls/call_context.h"

namespace crumb::server {

// Places of calls in progress, and of the kinds that have a bound of their own. CacheService,
// PeerService and each CallSockets have one of their own. Thread-safe.
struct CallsInProgress {
  CallsInProgress(const Limits& limits, int64_t part_max_percent)
      : all(static_cast<uint64_t>(limits.requests_max), part_max_percent),
        gets(static_cast<uint64_t>(limits.get_streams), part_max_percent),
        puts(static_cast<uint64_t>(limits.put_streams), part_max_percent),
        request_bytes(limits.request_bytes_max.value, part_max_percent),
        response_bytes(limits.response_bytes_max.value, part_max_percent) {}

  // Calls of every kind, and Gets and Puts among them.
  TenantBudget all;
  TenantBudget gets;
  TenantBudget puts;
  TenantBudget request_bytes;   // memory of large requests, until their calls end
  TenantBudget response_bytes;  // unary responses that their callers have not read yet
};

// Bytes of an encoded request that count in limits.request_bytes_max; 0: few.
inline uint64_t CountedBytes(size_t encoded_bytes) {
  return encoded_bytes <= kSmallRequestBytesMax ? 0 : encoded_bytes;
}

// Bytes of a decoded request that count in limits.request_bytes_max; 0: few. Messages of few bytes
// are bounded by limits.requests_max alone.
inline uint64_t CountedMemory(const google::protobuf::Message& request, size_t encoded_bytes) {
  constexpr size_t kTinyBytes = 512;
  if (encoded_bytes <= kTinyBytes) return 0;
  const uint64_t memory = request.SpaceUsedLong();
  return memory <= kSmallRequestBytesMax ? 0 : memory;
}

// One call from its arrival to its end: bounded, counted and timed. It lives as long as the call's
// response may be sent. Not thread-safe. REQUIRES: `context` and `calls` outlive it.
class CallScope {
 public:
  CallScope(const CallContext& context, CallsInProgress& calls, Rpc rpc)
      : context_(context), calls_(calls), rpc_(rpc), started_(context.clock.Now()) {
    context_.metrics.requests.Begin();
  }
  CallScope(const CallScope&) = delete;
  ~CallScope() {
    context_.metrics.requests.End();
    if (!observed_) Observe(code_);
  }

  // Takes a place for the tenant on whose behalf the call is made; empty: none. The call keeps its
  // request in memory until EndRequest: `request_bytes` of it count. kResourceExhausted when there
  // are more calls or bytes, or more of the tenant, than the bounds allow. Call once.
  absl::Status Admit(const std::string& tenant, uint64_t request_bytes = 0) {
    place_.emplace(calls_.all, tenant);
    if (place_->taken() != TenantBudget::Taken::kYes) {
      context_.metrics.Reject(Rejection::kRequests, place_->taken());
      return TenantBudget::Error(place_->taken(), "limits.requests_max");
    }
    return request_bytes == 0 ? absl::OkStatus() : CountRequest(tenant, request_bytes);
  }

  // Counts `request_bytes` of the tenant's request, in place of those that were counted before.
  absl::Status CountRequest(const std::string& tenant, uint64_t request_bytes) {
    request_.emplace(calls_.request_bytes, tenant, request_bytes);
    if (request_->taken() != TenantBudget::Taken::kYes) {
      context_.metrics.Reject(Rejection::kRequestBytes, request_->taken());
    }
    return TenantBudget::Error(request_->taken(), "limits.request_bytes_max");
  }

  // The call's request is not in memory any more.
  void EndRequest() { request_.reset(); }

  // Notes the status that the call ended with.
  void SetCode(absl::StatusCode code) { code_ = code; }

  // Ends the call's time with a status before its scope ends. Call at most once.
  void Observe(absl::StatusCode code) {
    observed_ = true;
    context_.metrics.requests.Observe(rpc_, code, SecondsBetween(started_, context_.clock.Now()));
  }

 private:
  const CallContext& context_;
  CallsInProgress& calls_;
  const Rpc rpc_;
  const TimePoint started_;
  // The call's places in the budgets, which end with the scope.
  std::optional<TenantGrant> place_;
  std::optional<TenantGrant> request_;
  absl::StatusCode code_ = absl::StatusCode::kOk;
  bool observed_ = false;
};

}  // namespace crumb::server
