// SPDX-FileCopyrightText: The Crumb authors
// SPDX-License-Identifier: Apache-2.0
#include "server/admin/exporter.h"
#include "server/admin/families.h"

namespace crumb::server {
namespace {

void AddCounter(Families& families, const char* name, const char* help, const Counter& value) {
  families.Counter(name, help, static_cast<double>(value.value()));
}

// Adds the counters of this node's requests for pages of other nodes.
void AddPulls(Families& families, const ClusterMetrics& metrics) {
  const auto counter = [&](const char* name, const char* help, const Counter& value) {
    AddCounter(families, name, help, value);
  };
  counter("crumb_pulls_total", "Requests that were sent to other nodes.", metrics.pulls);
  counter("crumb_finds_total", "Requests to other nodes that only locate pages.", metrics.finds);
  counter("crumb_pulls_refused_total",
          "Requests that were not sent to other nodes: cluster.pulls_max.", metrics.pulls_refused);
  counter("crumb_pulls_late_total", "Requests that other nodes did not complete in time.",
          metrics.pulls_late);
  counter("crumb_peer_acquires_total", "Calls for pages of other nodes.", metrics.pull_acquires);
  counter("crumb_peer_acquire_failures_total",
          "Calls for pages of other nodes that got no response.", metrics.pull_acquire_failures);
  counter("crumb_pulled_pages_total", "Pages that came from other nodes.", metrics.pulled_pages);
  counter("crumb_pulled_bytes_total", "Tile bytes of pages that came from other nodes.",
          metrics.pulled_bytes);
  counter("crumb_pull_coalesced_pages_total", "Pages that another request was fetching already.",
          metrics.pull_coalesced_pages);
  counter("crumb_pull_failed_pages_total", "Pages found elsewhere that did not arrive.",
          metrics.pull_failed_pages);
  counter("crumb_referred_runs_total", "Runs that homes referred this node to other nodes for.",
          metrics.referred_runs);
  counter("crumb_breaker_skips_total", "Requests not sent to a node: its breaker was open.",
          metrics.breaker_skips);
}

// Adds the counters of pages that this node offers to their homes.
void AddPushes(Families& families, const ClusterMetrics& metrics) {
  for (const auto& [outcome, pages] : {std::pair{"stored", &metrics.push_stored_pages},
                                       std::pair{"known", &metrics.push_known_pages},
                                       std::pair{"noted", &metrics.push_noted_pages},
                                       std::pair{"retried", &metrics.push_retried_pages}}) {
    families.Counter("crumb_pushed_pages_total", "Pages offered to their homes, by what became.",
                     static_cast<double>(pages->value()), {{"outcome", outcome}});
  }
  for (size_t i = 0; i < kPushDropCount; ++i) {
    families.Counter("crumb_push_dropped_pages_total", "Pages that a home was not given, and why.",
                     static_cast<double>(metrics.push_dropped[i].value()),
                     {{"reason", PushDropName(static_cast<PushDrop>(i))}});
  }
}

// Adds the counters of work that this node does for other nodes.
void AddServing(Families& families, const ClusterMetrics& metrics) {
  const auto counter = [&](const char* name, const char* help, const Counter& value) {
    AddCounter(families, name, help, value);
  };
  counter("crumb_received_pages_total", "Pages that other nodes gave to this one as their home.",
          metrics.received_pages);
  counter("crumb_noted_pages_total", "Pages offered to this node as their home and not fetched.",
          metrics.noted_pages);
  counter("crumb_referrals_total", "Runs that other nodes were referred to their holders for.",
          metrics.referrals_given);
  counter("crumb_holders_forgotten_total",
          "Holders that lacked what a node was referred to them for.", metrics.holders_forgotten);
  counter("crumb_served_peer_acquires_total", "Other nodes' requests for pages.",
          metrics.served_acquires);
  counter("crumb_served_peer_pages_total", "Pages that other nodes fetched.", metrics.served_pages);
  counter("crumb_peer_serve_refused_total", "Fetches without a right to the pages.",
          metrics.serve_refused);
  counter("crumb_peer_leases_reaped_total", "Leases of other nodes that ended by their time.",
          metrics.peer_leases_reaped);
  for (const auto& [what, refused] : {std::pair{"leases", &metrics.peer_leases_refused},
                                      std::pair{"reads", &metrics.peer_reads_refused},
                                      std::pair{"pushes", &metrics.peer_pushes_refused}}) {
    families.Counter("crumb_peer_refused_total",
                     "Requests of nodes that have as much as one node may have, by what of.",
                     static_cast<double>(refused->value()), {{"what", what}});
  }
}

// Adds the counters of views of the cluster and of records that nodes exchange.
void AddViews(Families& families, const ClusterMetrics& metrics) {
  const auto counter = [&](const char* name, const char* help, const Counter& value) {
    AddCounter(families, name, help, value);
  };
  counter("crumb_view_changes_total", "Views that came into force.", metrics.view_changes);
  counter("crumb_nodes_refused_total", "Nodes that cannot take part.", metrics.nodes_refused);
  counter("crumb_etcd_failures_total", "Calls to etcd that failed.", metrics.etcd_failures);
  counter("crumb_keyspace_merges_total", "Changes of keyspaces that came from other nodes.",
          metrics.keyspace_merges);
  counter("crumb_record_exchanges_total", "Calls that exchange keyspace records with other nodes.",
          metrics.record_exchanges);
  counter("crumb_record_exchange_failures_total",
          "Exchanges of keyspace records of which nothing was taken over.",
          metrics.record_exchange_failures);
  counter("crumb_records_refused_total", "Keyspace records of other nodes that were left out.",
          metrics.records_refused);
}

void AddClusterGauges(Families& families, const Cluster::Gauges& gauges) {
  const auto gauge = [&](const char* name, const char* help, size_t value) {
    families.Gauge(name, help, static_cast<double>(value));
  };
  gauge("crumb_view_epoch", "Epoch of the newest view; 0: no cluster.", gauges.view_epoch);
  gauge("crumb_view_nodes", "Nodes that are homes in the newest view.", gauges.view_nodes);
  gauge("crumb_pulls_active", "Requests that wait for other nodes.", gauges.pulls);
  gauge("crumb_push_queue_pages", "Pages waiting to be taken by their homes.", gauges.push_pages);
  gauge("crumb_directory_pages", "Pages of which this node, as their home, knows holders.",
        gauges.directory_pages);
  families.Counter("crumb_directory_evicted_pages_total",
                   "Pages whose holders were forgotten: cluster.directory_pages_max.",
                   static_cast<double>(gauges.directory_evicted_pages));
  gauge("crumb_peer_leases", "Leases that other nodes hold.", gauges.peer_leases);
  gauge("crumb_pages_withheld",
        "1 while pages are withheld because drops may not have been received.",
        gauges.withheld ? 1 : 0);
  gauge("crumb_withheld_keyspaces", "Keyspaces whose pages are withheld.",
        gauges.withheld_keyspaces);
  gauge("crumb_unsynced_nodes", "Nodes that respond, but whose drops could not be taken over.",
        gauges.unsynced_nodes);
  for (const Membership::State state : kEtcdStates) {
    families.Gauge("crumb_etcd_state", "1 for how it stands with etcd; all 0 without etcd.",
                   gauges.etcd == state ? 1 : 0, {{"state", EtcdStateName(state)}});
  }
  for (const Cluster::Gauges::Node& node : gauges.nodes) {
    families.Gauge("crumb_peer_up", "1 while the node responds.", node.up ? 1 : 0,
                   {{"node", node.id}});
  }
  for (const Cluster::Gauges::Node& node : gauges.nodes) {
    families.Gauge("crumb_breaker_state", "0 closed, 1 open, 2 half-open.",
                   static_cast<double>(node.breaker), {{"node", node.id}});
  }
  for (const Cluster::Gauges::Node& node : gauges.nodes) {
    families.Counter("crumb_breaker_opened_total", "Times that the node was silent for too long.",
                     static_cast<double>(node.breaker_opened), {{"node", node.id}});
  }
}

void AddTransportPages(Families& families, const char* name, const char* help,
                       const std::array<uint64_t, transport::kPageStatusCount>& pages) {
  for (int i = 0; i < transport::kPageStatusCount; ++i) {
    families.Counter(name, help, static_cast<double>(pages[static_cast<size_t>(i)]),
                     {{"status", PageStatusName(static_cast<transport::PageStatus>(i))}});
  }
}

void AddTransport(Families& families, const transport::TransportStats& stats) {
  const auto counter = [&](const char* name, const char* help, uint64_t value) {
    families.Counter(name, help, static_cast<double>(value));
  };
  const auto gauge = [&](const char* name, const char* help, uint64_t value) {
    families.Gauge(name, help, static_cast<double>(value));
  };
  AddTransportPages(families, "crumb_transport_pages_fetched_total",
                    "Pages fetched, by how they ended.", stats.pages_fetched);
  AddTransportPages(families, "crumb_transport_pages_served_total",
                    "Pages sent to other nodes, by how they ended.", stats.pages_served);
  counter("crumb_transport_fetches_total", "Fetches begun.", stats.fetches);
  counter("crumb_transport_fetches_refused_total", "Fetches not begun: over a bound.",
          stats.fetches_refused);
  gauge("crumb_transport_fetches_in_flight", "Fetches under way.", stats.fetches_in_flight);
  counter("crumb_transport_serves_total", "Fetches of other nodes.", stats.serves);
  counter("crumb_transport_serves_refused_total",
          "Fetches of other nodes that were refused: over a bound.", stats.serves_refused);
  gauge("crumb_transport_serves_in_flight", "Fetches of other nodes under way.",
        stats.serves_in_flight);
  gauge("crumb_transport_serve_bytes_in_flight", "Leased tiles being sent.",
        stats.serve_bytes_in_flight);
  gauge("crumb_transport_refusal_bytes", "Memory of busy responses that are not sent yet.",
        stats.refusal_bytes);
  counter("crumb_transport_unread_closes_total",
          "Connections closed because their peer did not read busy responses.",
          stats.unread_closes);
  gauge("crumb_transport_connections", "Connections to and from other nodes.", stats.connections);
  counter("crumb_transport_connections_opened_total", "Connections that came up.",
          stats.connections_opened);
  counter("crumb_transport_connections_failed_total", "Connections that broke.",
          stats.connections_failed);
  counter("crumb_transport_connections_refused_total", "Connections over the bound.",
          stats.connections_refused);
  counter("crumb_transport_version_mismatches_total", "Peers of another wire version.",
          stats.version_mismatches);
  counter("crumb_transport_frames_refused_total", "Frames that were malformed or of no fetch.",
          stats.frames_refused);
  counter("crumb_transport_frames_stale_total", "Frames of fetches that had ended.",
          stats.frames_stale);
  gauge("crumb_transport_quarantine_bytes", "Memory of ended fetches that may still be written.",
        stats.quarantine_bytes);
  counter("crumb_transport_quarantined_total", "Fetches whose memory outlived them.",
          stats.quarantined);
  counter("crumb_transport_forced_closes_total", "Connections closed to end quarantine.",
          stats.forced_closes);
}

}  // namespace

void AddCluster(Families& families, const ClusterScrape& scrape) {
  // The counters of a node that is alone are zero: every series is there from the start.
  static const ClusterMetrics kAlone;
  const ClusterMetrics& metrics = scrape.metrics == nullptr ? kAlone : *scrape.metrics;
  AddPulls(families, metrics);
  AddPushes(families, metrics);
  AddServing(families, metrics);
  AddViews(families, metrics);
  AddClusterGauges(families, scrape.gauges);
  AddTransport(families, scrape.transport);
}

ClusterScrape ScrapeOf(const Cluster& cluster) {
  ClusterScrape scrape;
  scrape.metrics = &cluster.metrics();
  scrape.gauges = cluster.gauges();
  if (const transport::Transport* transport = cluster.transport()) {
    scrape.transport = transport->stats();
    scrape.transport_name = transport->Describe();
  }
  return scrape;
}

}  // namespace crumb::server
