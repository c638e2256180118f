// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "server/base/certificate_watch.h"
#include "server/base/heap_trimmer.h"
#include "server/cluster/cluster.h"
#include "server/events/event_hub.h"
#include "server/metrics/server_metrics.h"
#include "server/session/session_table.h"
#include "server/tenants/tenant_table.h"
#include "storage/store_stats.h"

namespace crumb::server {

// The cluster's part of a scrape.
struct ClusterScrape {
  const ClusterMetrics* metrics = nullptr;  // null: this node is alone
  Cluster::Gauges gauges;
  transport::TransportStats transport;
  std::string transport_name = "none";
};
// `cluster` must outlive the scrape.
ClusterScrape ScrapeOf(const Cluster& cluster);

// The tenants' part of a scrape.
struct TenantScrape {
  struct Use {
    std::string tenant;
    uint64_t used_bytes = 0;
    uint64_t quota_bytes = 0;  // 0: no bound
    std::array<uint64_t, kReportedCount> reported{};
  };
  std::vector<Use> uses;
  std::array<uint64_t, kAuthFailureCount> failures{};
  uint64_t reload_failures = 0;
};
// `bytes_of` returns the bytes that a tenant's pages use.
TenantScrape ScrapeOf(const TenantTable& tenants, const ReportedAmounts& reported,
                      const std::function<uint64_t(const std::string& tenant)>& bytes_of);

// The content of one scrape: references and copies of everything that /metrics shows, taken at one
// time. It is used on one thread and only while ExportText runs.
struct Scrape {
  const ServerMetrics& metrics;
  storage::StoreStats store;
  SessionTable::Totals sessions;
  std::array<PageWindows::Reading, PageWindows::kWindows.size()> requested_pages;
  size_t active_keyspaces = 0;
  size_t bf16_keyspaces = 0;
  size_t commit_queue = 0;
  size_t control_queue = 0;
  size_t large_call_queue = 0;
  size_t watchers = 0;
  std::string version;
  // Zeros without a cluster.
  ClusterScrape cluster;
  TenantScrape tenants = {};
  std::vector<CertificateWatch::Reading> certificates = {};
  uint64_t tls_handshake_failures = 0;
  HeapBytes heap = {};
};

// Returns the Prometheus text format, version 0.0.4. docs/metrics.md lists every series.
std::string ExportText(const Scrape& scrape);

}  // namespace crumb::server
