// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/exporter.h"

#include <vector>

#include "common/recent_log.h"
#include "server/admin/families.h"
#include "server/metrics/counter_list.h"

namespace crumb::server {
namespace {

void AddLive(Families& families, const std::string& name, const std::string& help,
             const Histogram& histogram, const Families::LabelList& labels) {
  families.HistogramOf(
      name, help, histogram.bounds(), [&](size_t i) { return histogram.bucket(i); },
      histogram.sum(), labels);
}

void AddTokens(Families& families, const ServerMetrics& metrics) {
  metrics.tokens.ForEach([&](const std::string& model, const TokenCounters& counters) {
    for (int i = 0; i < kTokenTierCount; ++i) {
      const auto tier = static_cast<TokenTier>(i);
      families.Counter("crumb_lookup_tokens_total",
                       "Requested tokens by where they were found; the tiers sum to all.",
                       static_cast<double>(counters.value(tier)),
                       {{"model", model}, {"tier", TokenTierName(tier)}});
    }
  });
  for (const TokenTier tier :
       {TokenTier::kDevice, TokenTier::kHost, TokenTier::kSsd, TokenTier::kRemote}) {
    families.Counter("crumb_fetched_tokens_total", "Tokens of leased pages by where they were.",
                     static_cast<double>(metrics.fetched_tokens[static_cast<size_t>(tier)].value()),
                     {{"tier", TokenTierName(tier)}});
  }
}

// Adds the pages that were requested and the distinct pages among them. Their ratio bounds the hit
// rate that any cache could have.
void AddRequestedPages(Families& families, const Scrape& scrape) {
  for (const PageWindows::Reading& reading : scrape.requested_pages) {
    families.Gauge("crumb_requested_pages_window", "Pages that Acquires requested lately.",
                   static_cast<double>(reading.requested_pages), {{"window", reading.window}});
  }
  for (const PageWindows::Reading& reading : scrape.requested_pages) {
    families.Gauge("crumb_unique_pages_estimate",
                   "Distinct pages that Acquires requested lately, estimated.",
                   reading.unique_pages, {{"window", reading.window}});
  }
}

struct NamedTier {
  const char* name;
  const storage::TierStats& stats;
};

void AddTierBytes(Families& families, const std::vector<NamedTier>& tiers) {
  const auto gauge = [&](const char* name, const char* help, uint64_t storage::TierStats::*member) {
    for (const auto& [tier, stats] : tiers) {
      families.Gauge(name, help, static_cast<double>(stats.*member), {{"tier", tier}});
    }
  };
  gauge("crumb_capacity_bytes", "Bytes a tier may take.", &storage::TierStats::capacity_bytes);
  gauge("crumb_resident_bytes", "Bytes of the fragments in a tier.",
        &storage::TierStats::resident_bytes);
  gauge("crumb_resident_logical_bytes", "What the same tiles would take in BF16.",
        &storage::TierStats::resident_logical_bytes);
  gauge("crumb_resident_pages", "Pages in a tier.", &storage::TierStats::pages);
  const auto bytes = [&](const char* name, const char* help, uint64_t storage::TierStats::*put,
                         uint64_t storage::TierStats::*get) {
    for (const auto& [tier, stats] : tiers) {
      families.Counter(name, help, static_cast<double>(stats.*put),
                       {{"op", "put"}, {"tier", tier}});
      families.Counter(name, help, static_cast<double>(stats.*get),
                       {{"op", "get"}, {"tier", tier}});
    }
  };
  bytes("crumb_stored_bytes_total", "Tile bytes put into and got from a tier.",
        &storage::TierStats::stored_put_bytes, &storage::TierStats::stored_get_bytes);
  bytes("crumb_logical_bytes_total", "What the same tiles would take in BF16.",
        &storage::TierStats::logical_put_bytes, &storage::TierStats::logical_get_bytes);
}

void AddTierPages(Families& families, const std::vector<NamedTier>& tiers) {
  for (const auto& [tier, stats] : tiers) {
    const storage::EvictionCounts& evicted = stats.evicted;
    for (const auto& [reason, pages] :
         {std::pair{"capacity", evicted.capacity}, std::pair{"ancestor", evicted.ancestor},
          std::pair{"deleted", evicted.deleted}, std::pair{"corrupt", evicted.corrupt}}) {
      families.Counter("crumb_evicted_pages_total", "Pages that left a tier.",
                       static_cast<double>(pages), {{"tier", tier}, {"reason", reason}});
    }
  }
  const auto histogram = [&](const char* name, const char* help,
                             storage::HistogramSnapshot storage::TierStats::*member) {
    for (const auto& [tier, stats] : tiers) {
      storage::HistogramSnapshot snapshot = stats.*member;
      if (snapshot.counts.empty()) {  // a tier that is not there
        snapshot.bounds.assign(LifetimeBounds().begin(), LifetimeBounds().end());
        snapshot.counts.assign(snapshot.bounds.size() + 1, 0);
      }
      families.HistogramOf(name, help, snapshot.bounds,
                           [&](size_t i) { return snapshot.counts[i]; }, snapshot.sum,
                           {{"tier", tier}});
    }
  };
  histogram("crumb_page_lifetime_seconds", "From a page's arrival in a tier to its eviction.",
            &storage::TierStats::page_lifetime_seconds);
  histogram("crumb_reuse_gap_seconds", "Between two hits of a page.",
            &storage::TierStats::reuse_gap_seconds);
}

// "active", "read-only: why" or "off: why" as one series each, of which one is 1.
void AddTierStates(Families& families, const std::vector<NamedTier>& tiers) {
  for (const auto& [tier, stats] : tiers) {
    const std::string state = stats.state.substr(0, stats.state.find(':'));
    for (const char* name : {"active", "read-only", "off"}) {
      families.Gauge("crumb_tier_state", "1 for the state that a tier is in.", state == name,
                     {{"tier", tier}, {"state", name}});
    }
  }
}

void AddPath(Families& families, const Scrape& scrape) {
  for (int rpc = 0; rpc < kRpcCount; ++rpc) {
    for (int outcome = 0; outcome < kOutcomeCount; ++outcome) {
      AddLive(families, "crumb_request_seconds", "Duration of calls, streams included.",
              scrape.metrics.requests.of(static_cast<Rpc>(rpc), static_cast<Outcome>(outcome)),
              {{"rpc", RpcName(static_cast<Rpc>(rpc))},
               {"outcome", OutcomeName(static_cast<Outcome>(outcome))}});
    }
  }
  for (int stage = 0; stage < kStageCount; ++stage) {
    AddLive(families, "crumb_stage_seconds", "Where calls spend their time.",
            scrape.metrics.stages.of(static_cast<Stage>(stage)),
            {{"stage", StageName(static_cast<Stage>(stage))}});
  }
  families.Gauge("crumb_requests_in_flight", "Calls in progress, streams included.",
                 static_cast<double>(scrape.metrics.requests.in_flight()));
  for (const auto& [queue, depth] :
       {std::pair{"commit", scrape.commit_queue}, std::pair{"control", scrape.control_queue},
        std::pair{"large_calls", scrape.large_call_queue},
        std::pair{"ssd_write", static_cast<size_t>(scrape.store.write_queue_pages)}}) {
    families.Gauge("crumb_queue_depth", "Entries waiting in a queue.", static_cast<double>(depth),
                   {{"queue", queue}});
  }
}

void AddReasons(Families& families, const Scrape& scrape) {
  const ServerMetrics& metrics = scrape.metrics;
  const auto rejections = [&](const char* name, const char* help,
                              const std::array<Counter, kRejectionCount>& counters) {
    for (size_t i = 0; i < counters.size(); ++i) {
      families.Counter(name, help, static_cast<double>(counters[i].value()),
                       {{"reason", RejectionName(static_cast<Rejection>(i))}});
    }
  };
  rejections("crumb_rejected_total", "Calls turned away over a bound.", metrics.rejected);
  rejections("crumb_tenant_rejected_total",
             "Calls turned away because their tenant held its part of a bound.",
             metrics.part_rejected);
  for (int i = 0; i < kRefusalCount; ++i) {
    families.Counter("crumb_pages_refused_total", "Fragments that were not stored.",
                     static_cast<double>(metrics.refused_pages[static_cast<size_t>(i)].value()),
                     {{"reason", RefusalName(static_cast<Refusal>(i))}});
  }
  for (const auto& [where, count] :
       {std::pair{"commit", scrape.store.verify_failures_commit},
        std::pair{"ssd", scrape.store.verify_failures_ssd},
        std::pair{"device", scrape.store.verify_failures_device},
        std::pair{"client", metrics.client_verify_failures.value()},
        std::pair{"peer", scrape.cluster.metrics == nullptr
                              ? uint64_t{0}
                              : scrape.cluster.metrics->pull_corrupt_pages.value()}}) {
    families.Counter("crumb_verify_failures_total", "Checksums or headers that did not match.",
                     static_cast<double>(count), {{"where", where}});
  }
  for (const auto& [name, severity] :
       {std::pair{"warning", Severity::kWarning}, std::pair{"error", Severity::kError}}) {
    families.Counter("crumb_log_messages_total", "Warnings and errors that were logged.",
                     static_cast<double>(RecentLog::Process().Count(severity)),
                     {{"severity", name}});
  }
  const auto transferred = [&](const char* plane, const char* direction, uint64_t bytes) {
    families.Counter("crumb_transferred_bytes_total", "Tile bytes between crumbd and callers.",
                     static_cast<double>(bytes), {{"plane", plane}, {"direction", direction}});
  };
  transferred("shm", "in", metrics.shm_bytes_in.value());
  transferred("shm", "out", metrics.shm_bytes_out.value());
  transferred("grpc", "in", metrics.grpc_bytes_in.value());
  transferred("grpc", "out", metrics.grpc_bytes_out.value());
  transferred("ucx", "in", scrape.cluster.transport.bytes_fetched);
  transferred("ucx", "out", scrape.cluster.transport.bytes_served);
}

void AddQuality(Families& families, const QualityMetrics& quality) {
  for (size_t layer = 0; layer < quality.layers(); ++layer) {
    AddLive(families, "crumb_attention_error",
            "Error of attention over evicted windows, by sampling: ratio of norms.",
            quality.attention_error(layer), {{"layer", std::to_string(layer)}});
  }
  for (const auto& [kind, histogram] :
       {std::pair{"key", &quality.key_error()}, std::pair{"value", &quality.value_error()}}) {
    AddLive(families, "crumb_quant_error_ratio",
            "Error of quantized rows of evicted windows, by sampling: ratio of norms.", *histogram,
            {{"kind", kind}});
  }
}

void AddSlabs(Families& families, const storage::StoreStats& store) {
  families.Gauge("crumb_slab_waste_bytes", "Bytes lost to rounding and slab ends.",
                 static_cast<double>(store.host.waste_bytes));
  for (const auto& [state, slabs] :
       {std::pair{"owned", store.slabs_owned}, std::pair{"closing", store.slabs_closing},
        std::pair{"gone", store.slabs_gone}, std::pair{"kept", store.slabs_kept}}) {
    families.Gauge("crumb_slabs", "Slabs of host memory by state.", static_cast<double>(slabs),
                   {{"state", state}});
  }
  families.Counter("crumb_slab_pinned_checks_total",
                   "Looks at slabs that were given up which found pages of them pinned.",
                   static_cast<double>(store.slab_pinned_checks));
  families.Counter("crumb_slab_moves_total", "Slabs that went from one tenant to another.",
                   static_cast<double>(store.slab_moves));
  families.Counter("crumb_slabs_revoked_total",
                   "Slabs taken from processes that did not let them go in time.",
                   static_cast<double>(store.slabs_revoked));
  families.Counter("crumb_slab_renewals_failed_total",
                   "Slabs that moved and could not take their memory again.",
                   static_cast<double>(store.slab_renewals_failed));
}

void AddGauges(Families& families, const Scrape& scrape) {
  const auto gauge = [&](const char* name, const char* help, double value) {
    families.Gauge(name, help, value);
  };
  const storage::StoreStats& store = scrape.store;
  gauge("crumb_leases", "Leases held.", static_cast<double>(store.leases));
  gauge("crumb_leased_slots", "Slots that leases hold.", static_cast<double>(store.leased_slots));
  gauge("crumb_lease_oldest_seconds", "Age of the oldest lease.", store.oldest_lease_seconds);
  const storage::DevicePoolStats& pools = scrape.store.pools;
  gauge("crumb_device_pools", "Device pools.", static_cast<double>(pools.pools));
  gauge("crumb_device_handles", "Pieces of device memory whose descriptors are kept.",
        static_cast<double>(pools.handles));
  for (const auto& [state, slots] :
       std::initializer_list<std::pair<const char*, uint64_t>>{{"free", pools.free_slots},
                                                               {"blank", pools.blank_slots},
                                                               {"held", pools.held_slots},
                                                               {"demoting", pools.demoting_slots},
                                                               {"unknown", pools.unknown_slots}}) {
    families.Gauge("crumb_device_slots", "Slots of device pools by what they are used for.",
                   static_cast<double>(slots), {{"state", state}});
  }
  gauge("crumb_reservations", "Reservations of staging memory.",
        static_cast<double>(scrape.sessions.reservations));
  gauge("crumb_sessions", "Sessions open.", static_cast<double>(scrape.sessions.sessions));
  gauge("crumb_engines", "Engines open.", static_cast<double>(scrape.sessions.engines));
  gauge("crumb_staging_bytes", "Staging memory of all sessions.",
        static_cast<double>(scrape.sessions.staging_bytes));
  gauge("crumb_held_bytes", "Bytes that leases, reads and pins keep, where there are tenants.",
        static_cast<double>(store.held_bytes));
  gauge("crumb_watchers", "WatchEvents calls.", static_cast<double>(scrape.watchers));
  for (const auto& [state, count] :
       {std::pair{"active", scrape.active_keyspaces}, std::pair{"bf16", scrape.bf16_keyspaces}}) {
    families.Gauge("crumb_keyspaces", "Keyspaces by state.", static_cast<double>(count),
                   {{"state", state}});
  }
  for (const auto& [state, bytes] :
       {std::pair{"used", scrape.heap.used}, std::pair{"free", scrape.heap.free}}) {
    families.Gauge("crumb_heap_bytes", "Memory of crumbd's own heap, beside slabs and staging.",
                   static_cast<double>(bytes), {{"state", state}});
  }
  families.Gauge("crumb_recovery_pages", "Pages at the last start.",
                 static_cast<double>(store.recovered_pages), {{"outcome", "recovered"}});
  families.Gauge("crumb_recovery_pages", "Pages at the last start.",
                 static_cast<double>(store.discarded_pages), {{"outcome", "discarded"}});
  gauge("crumb_recovery_seconds", "Duration of recovery at the last start.",
        store.recovery_seconds);
  families.Gauge(
      "crumb_build_info", "Always 1; what runs.", 1,
      {{"version", scrape.version}, {"ucx", scrape.cluster.transport_name}, {"cuda", "none"}});
}

void AddTenants(Families& families, const TenantScrape& tenants) {
  for (const TenantScrape::Use& use : tenants.uses) {
    families.Gauge("crumb_tenant_used_bytes", "Bytes of a tenant's pages in all tiers.",
                   static_cast<double>(use.used_bytes), {{"tenant", use.tenant}});
  }
  for (const TenantScrape::Use& use : tenants.uses) {
    families.Gauge("crumb_tenant_quota_bytes", "Bytes that a tenant may take; 0: no bound.",
                   static_cast<double>(use.quota_bytes), {{"tenant", use.tenant}});
  }
  for (const TenantScrape::Use& use : tenants.uses) {
    for (size_t i = 0; i < use.reported.size(); ++i) {
      families.Counter(
          "crumb_tenant_reported_total", "Amounts that a tenant's clients reported.",
          static_cast<double>(use.reported[i]),
          {{"tenant", use.tenant}, {"amount", ReportedName(static_cast<Reported>(i))}});
    }
  }
  for (int i = 0; i < kAuthFailureCount; ++i) {
    families.Counter("crumb_unauthenticated_total", "Calls and sessions without a valid token.",
                     static_cast<double>(tenants.failures[static_cast<size_t>(i)]),
                     {{"reason", AuthFailureName(static_cast<AuthFailure>(i))}});
  }
  families.Counter("crumb_tenant_reload_failures_total",
                   "Times that tenants.file could not be read again.",
                   static_cast<double>(tenants.reload_failures));
}

void AddCertificates(Families& families, const std::vector<CertificateWatch::Reading>& readings) {
  for (const CertificateWatch::Reading& reading : readings) {
    const auto expires = reading.expires.value_or(CertificateWatch::Instant());
    families.Gauge("crumb_certificate_expiry_timestamp_seconds",
                   "Unix time at which the certificates of a setting end; 0: not set.",
                   std::chrono::duration<double>(expires.time_since_epoch()).count(),
                   {{"setting", reading.setting}});
  }
}

}  // namespace

TenantScrape ScrapeOf(const TenantTable& tenants, const ReportedAmounts& reported,
                      const std::function<uint64_t(const std::string& tenant)>& bytes_of) {
  TenantScrape scrape;
  for (const auto& tenant : tenants.List()) {
    scrape.uses.push_back({.tenant = tenant->name,
                           .used_bytes = bytes_of(tenant->name),
                           .quota_bytes = tenant->quota_bytes,
                           .reported = reported.CountedOf(tenant->name)});
  }
  for (int i = 0; i < kAuthFailureCount; ++i) {
    scrape.failures[static_cast<size_t>(i)] = tenants.failures(static_cast<AuthFailure>(i));
  }
  scrape.reload_failures = tenants.reload_failures();
  return scrape;
}

std::string ExportText(const Scrape& scrape) {
  Families families;
  const std::vector<NamedTier> tiers = {
      {"device", scrape.store.device}, {"host", scrape.store.host}, {"ssd", scrape.store.ssd}};
  AddTokens(families, scrape.metrics);
  AddRequestedPages(families, scrape);
  for (const NamedCounter& counter : UnlabelledCounters(scrape.metrics, scrape.store)) {
    families.Counter(counter.name, counter.help, static_cast<double>(counter.value));
  }
  AddTierBytes(families, tiers);
  AddTierPages(families, tiers);
  AddTierStates(families, tiers);
  AddPath(families, scrape);
  AddReasons(families, scrape);
  AddQuality(families, scrape.metrics.quality);
  AddGauges(families, scrape);
  AddSlabs(families, scrape.store);
  AddCluster(families, scrape.cluster);
  AddTenants(families, scrape.tenants);
  AddCertificates(families, scrape.certificates);
  families.Counter("crumb_tls_handshake_failures_total",
                   "TLS handshakes that failed, of callers and with other nodes.",
                   static_cast<double>(scrape.tls_handshake_failures));
  return families.Serialize();
}

}  // namespace crumb::server
