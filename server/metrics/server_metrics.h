// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "common/clock.h"
#include "common/metrics.h"
#include "common/tenant_budget.h"
#include "server/metrics/model_tokens.h"
#include "server/metrics/page_windows.h"
#include "server/metrics/reported_amounts.h"
#include "server/metrics/request_metrics.h"

namespace crumb::server {

// Stages in which a commit or a call spends its time.
enum class Stage : uint8_t {
  kAcquireStore,  // Acquire: from the call into the store to its result
  kCommitQueue,   // a commit waiting for a thread
  kCommitStore,   // copying and verifying one commit call
  kControlQueue,  // a call that writes records waiting for its thread
  kFlush,
};
inline constexpr int kStageCount = 5;
// Returns the value of the metrics' label `stage`.
const char* StageName(Stage stage);

// The bound for which a call, a session or a connection was turned away; docs/config.md has the
// settings.
enum class Rejection : uint8_t {
  kRequests,
  kCommitQueue,
  kControlQueue,
  kGetStreams,
  kPutStreams,
  kWatchers,
  kSessions,
  kStaging,
  kLeaseBudget,
  kSlabGrant,
  kDeviceSums,
  kDevicePools,
  kDeviceHandles,
  kDeviceSlots,
  kPrefetches,
  kHeldMemory,
  kKeyspaces,
  kDeviceTenant,
  kConnections,
  kResponses,
  kUnreadDescriptors,
  kLargeCallQueue,
  kRequestBytes,
};
inline constexpr int kRejectionCount = 23;
// Returns the value of the metrics' label `reason`.
const char* RejectionName(Rejection reason);

// Why a fragment was not stored: its checksums differ, it does not belong to the keyspace, its
// values are not finite, there is no room for it, or its tenant's quota is used up.
enum class Refusal : uint8_t { kChecksum, kInvalid, kNonFinite, kNoRoom, kQuota };
inline constexpr int kRefusalCount = 5;
const char* RefusalName(Refusal reason);

// Durations of the stages, in seconds. Thread-safe.
class StageMetrics {
 public:
  StageMetrics();
  Histogram& of(Stage stage) { return stages_[static_cast<size_t>(stage)]; }
  const Histogram& of(Stage stage) const { return stages_[static_cast<size_t>(stage)]; }

 private:
  std::deque<Histogram> stages_;
};

// Errors of evicted windows as clients measured them. Thread-safe; lives as long as the daemon.
class QualityMetrics {
 public:
  // Layers with a series of their own; deeper ones share the last.
  static constexpr size_t kLayersMax = 128;

  QualityMetrics();

  // Values that are no ratio (negative, not finite) are left out.
  void Observe(size_t layer, double attention_error, double key_error, double value_error);
  // Makes series for the layers of a model that is served.
  void Cover(size_t layers);

  size_t layers() const { return layers_.load(std::memory_order_acquire); }
  const Histogram& attention_error(size_t layer) const { return attention_error_[layer]; }
  const Histogram& key_error() const { return key_error_; }
  const Histogram& value_error() const { return value_error_; }

 private:
  Histogram key_error_;
  Histogram value_error_;
  std::deque<Histogram> attention_error_;  // kLayersMax
  std::atomic<size_t> layers_{1};
};

// Counters of the daemon's own parts. Thread-safe; lives as long as the daemon.
struct ServerMetrics {
  explicit ServerMetrics(size_t model_labels_max, int64_t part_max_percent = 100)
      : tokens(model_labels_max, part_max_percent) {}

  RequestMetrics requests;
  StageMetrics stages;
  ModelTokens tokens;
  PageWindows requested_pages{Clock::Real().Now()};  // pages that Acquires requested
  std::array<Counter, kRejectionCount> rejected;
  // Requests refused because the tenant held its part.
  std::array<Counter, kRejectionCount> part_rejected;
  std::array<Counter, kRefusalCount> refused_pages;
  std::array<Counter, kTokenTierCount> fetched_tokens;  // tokens of leased pages

  // Reported by clients, within the bounds of `reported`.
  ReportedAmounts reported;
  QualityMetrics quality;
  // Sums of the amounts that clients report on their session streams.
  Counter used_tokens;
  Counter prefill_tokens_avoided;
  Counter publish_dropped_pages;
  Counter client_deadline_exceeded;
  Counter client_verify_failures;
  Counter scrubbed_pages;

  Counter deadline_exceeded;  // Acquires that ended with miss reason DEADLINE
  Counter sessions_opened;
  Counter sessions_reaped;  // ended because the process did
  Counter hellos_refused;
  Counter accept_pauses;  // pauses of crumbd.fd.sock because descriptors or places had run out
  Counter admin_closed;   // connections of the admin port that ended without a response
  Counter leases_reaped;  // ended with their engine
  Counter events_lost;
  Counter notices_dropped;
  Counter stalled_streams;      // calls ended because their caller neither sent nor read
  Counter stalled_connections;  // gRPC connections ended because their peers read nothing
  Counter keyspaces_ended;      // keyspaces ended because they were unused for a time
  // Tile bytes that went over gRPC (Put, Get) and through shared memory (Commit, Acquire).
  Counter grpc_bytes_in;  // tile bytes through Put
  Counter grpc_bytes_out;
  Counter shm_bytes_in;  // tile bytes through staging
  Counter shm_bytes_out;

  // Counts a rejection; kPartFull: because the tenant held its part of the bound.
  void Reject(Rejection reason, TenantBudget::Taken why = TenantBudget::Taken::kTotalFull) {
    rejected[static_cast<size_t>(reason)].Add();
    if (why == TenantBudget::Taken::kPartFull) part_rejected[static_cast<size_t>(reason)].Add();
  }
  // Counts fragments that were not stored.
  void Refuse(Refusal reason, uint64_t pages = 1) {
    refused_pages[static_cast<size_t>(reason)].Add(pages);
  }
};

// Seconds between two instants.
inline double SecondsBetween(TimePoint from, TimePoint to) {
  return std::chrono::duration<double>(to - from).count();
}

}  // namespace crumb::server
