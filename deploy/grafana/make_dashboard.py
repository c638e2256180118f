#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Writes dashboards/crumb.json: the panels are listed first, Grafana's format follows below."""

import argparse
import json
import pathlib
import sys

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
PANEL_WIDTH = 8
PANEL_HEIGHT = 8
WIDTH = 24

I = 'instance=~"$instance"'
RATE = "[$__rate_interval]"
HITS = I + ',tier!~"miss|window"'
OF_MODEL = I + ',model=~"$model"'


def rate(by, series, labels=I):
    return f"sum by ({by}) (rate({series}{{{labels}}}{RATE}))"


def total(series, labels=I):
    return f"sum (rate({series}{{{labels}}}{RATE}))"


def quantile(q, by, series, labels=I):
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({series}_bucket{{{labels}}}{RATE})))"


def plot(title, unit, *queries, stack=None, text=""):
    """A chart over time; each query is (legend, expression)."""
    return {"title": title, "unit": unit, "queries": queries, "stack": stack, "text": text}


ROWS = [
    ("Is it worth having?", [
        plot("Requested tokens by where they were found", "percentunit",
             ("{{tier}}", rate("tier", "crumb_lookup_tokens_total", OF_MODEL)
                         + " / on () group_left " + total("crumb_lookup_tokens_total", OF_MODEL)),
             stack="normal", text="The labels sum to all requested tokens. window: tokens that no "
                                  "page is requested, the newest of each prompt."),
        plot("Hit rate of pages and its ceiling", "percentunit",
             ("hit rate {{instance}}", f"crumb:page_hit_rate:ratio_rate5m{{{I}}}"),
             ("ceiling {{window}} {{instance}}", f"crumb:hit_ceiling:ratio{{{I}}}"),
             text="The ceiling is what a cache without bounds would have reached."),
        plot("Prefill tokens avoided", "short",
             ("tokens/s", total("crumb_prefill_tokens_avoided_total")),
             ("GPU seconds per second",
              total("crumb_prefill_tokens_avoided_total") + " / $prefill_tokens_per_second"),
             text="GPU seconds follow from the variable prefill_tokens_per_second."),
        plot("Load time against prefill time, per token", "s",
             ("load", total("crumb_stage_seconds_sum", I + ',stage="acquire_store"')
                      + " / " + total("crumb_fetched_tokens_total")),
             ("prefill", "vector(1 / $prefill_tokens_per_second)"),
             text="Above the prefill line a hit costs more than it saves."),
        plot("Stored against loaded bytes", "Bps",
             ("stored {{tier}}", rate("tier", "crumb_stored_bytes_total", I + ',op="put"')),
             ("loaded {{tier}}", rate("tier", "crumb_stored_bytes_total", I + ',op="get"')),
             text="Stores without loads are pure cost. Time to first token with and without hits "
                  "is the engine's metric (vLLM: vllm:time_to_first_token_seconds)."),
    ]),
    ("Bytes saved", [
        plot("Resident, and what it would take in BF16", "bytes",
             ("{{tier}} as BF16", f"sum by (tier) (crumb_resident_logical_bytes{{{I}}})"),
             ("{{tier}}", f"sum by (tier) (crumb_resident_bytes{{{I}}})")),
        plot("Saving factor", "short",
             ("{{tier}} {{instance}}", f"crumb:saving_factor:ratio{{{I}}}")),
        plot("Bytes put and got, as BF16 and as stored", "Bps",
             ("{{op}} as BF16", rate("op", "crumb_logical_bytes_total")),
             ("{{op}} stored", rate("op", "crumb_stored_bytes_total"))),
        plot("Saved and deduplicated", "Bps",
             ("saved {{op}} {{tier}}", f"sum by (op, tier) (crumb:saved_bytes:rate5m{{{I}}})"),
             ("deduplicated", total("crumb_dedup_bytes_total"))),
        plot("Quantisation error", "percentunit",
             ("{{kind}} median", quantile(0.5, "kind", "crumb_quant_error_ratio")),
             ("{{kind}} 99th", quantile(0.99, "kind", "crumb_quant_error_ratio"))),
        plot("Attention error by layer, 90th percentile", "percentunit",
             ("{{layer}}", quantile(0.9, "layer", "crumb_attention_error"))),
    ]),
    ("Funnel", [
        plot("Tokens found, fetched in time, used", "short",
             ("{{stage}}", f"sum by (stage) (crumb:funnel_tokens:rate5m{{{I}}})")),
        plot("Fetched tokens by tier", "short",
             ("{{tier}}", rate("tier", "crumb_fetched_tokens_total")), stack="normal"),
        plot("Why pages were dropped", "short",
             ("not published: queue full", total("crumb_publish_dropped_pages_total")),
             ("refused: {{reason}}", rate("reason", "crumb_pages_refused_total")),
             ("not on SSD: disk lagged", total("crumb_write_queue_dropped_total")),
             ("not on SSD: admission", total("crumb_admission_rejected_total"))),
    ]),
    ("Latency", [
        plot("Calls, median", "s", ("{{rpc}}", quantile(0.5, "rpc", "crumb_request_seconds"))),
        plot("Calls, 99th percentile", "s",
             ("{{rpc}}", quantile(0.99, "rpc", "crumb_request_seconds"))),
        plot("Stages, 99th percentile", "s",
             ("{{stage}}", quantile(0.99, "stage", "crumb_stage_seconds"))),
        plot("Calls per second", "reqps",
             ("{{rpc}} {{outcome}}", rate("rpc, outcome", "crumb_request_seconds_count") + " > 0")),
    ]),
    ("Capacity and eviction", [
        plot("Fill", "percentunit", ("{{tier}} {{instance}}", f"crumb:tier_fill:ratio{{{I}}}")),
        plot("Evictions", "short",
             ("{{tier}} {{reason}}", rate("tier, reason", "crumb_evicted_pages_total"))),
        plot("Lifetime against reuse gap, medians", "s",
             ("lifetime {{tier}}", quantile(0.5, "tier", "crumb_page_lifetime_seconds")),
             ("reuse gap {{tier}}", quantile(0.5, "tier", "crumb_reuse_gap_seconds")),
             text="A lifetime below the reuse gap: the tier is too small."),
        plot("Pages", "short", ("{{tier}}", f"sum by (tier) (crumb_resident_pages{{{I}}})")),
        plot("No room, and waste", "short",
             ("refused pages/s", total("crumb_pages_refused_total", I + ',reason="no_room"')),
             ("slab waste, bytes", f"sum (crumb_slab_waste_bytes{{{I}}})")),
        plot("Slabs of host memory", "short",
             ("{{state}} {{instance}}", f"sum by (state, instance) (crumb_slabs{{{I}}})"),
             ("moved between tenants/s", total("crumb_slab_moves_total")),
             text="gone: emptied, for another tenant or after a takeover, and still mapped by processes."),
        plot("Slots of device pools", "short",
             ("{{state}}", f"sum by (state) (crumb_device_slots{{{I}}})"),
             text="unknown: slots of processes that have not reported to this crumbd since its start."),
        plot("Device pools, and pages that leave them", "short",
             ("pools", f"sum (crumb_device_pools{{{I}}})"),
             ("handles", f"sum (crumb_device_handles{{{I}}})"),
             ("copied down/s", total("crumb_device_demoted_slots_total")),
             ("dropped/s", total("crumb_device_dropped_slots_total"))),
    ]),
    ("Back-pressure", [
        plot("Queues", "short", ("{{queue}}", f"sum by (queue) (crumb_queue_depth{{{I}}})")),
        plot("Calls turned away", "short", ("{{reason}}", rate("reason", "crumb_rejected_total"))),
        plot("Calls turned away: their tenant held its part", "short",
             ("{{reason}}", rate("reason", "crumb_tenant_rejected_total"))),
        plot("Callers without progress", "short",
             ("calls ended", total("crumb_stalled_streams_total")),
             ("connections closed", total("crumb_stalled_connections_total"))),
        plot("Deadlines", "short",
             ("Acquires cut short", total("crumb_deadline_exceeded_total")),
             ("calls that clients gave up", total("crumb_client_deadline_exceeded_total"))),
        plot("In progress", "short",
             ("calls", f"sum (crumb_requests_in_flight{{{I}}})"),
             ("leases", f"sum (crumb_leases{{{I}}})"),
             ("reservations", f"sum (crumb_reservations{{{I}}})")),
    ]),
    ("Transport", [
        plot("Bytes by plane", "Bps",
             ("{{plane}} {{direction}}",
              rate("plane, direction", "crumb_transferred_bytes_total"))),
        plot("Sessions", "short",
             ("sessions", f"sum (crumb_sessions{{{I}}})"),
             ("engines", f"sum (crumb_engines{{{I}}})"),
             ("watchers", f"sum (crumb_watchers{{{I}}})")),
        plot("Staging memory", "bytes", ("staging", f"sum (crumb_staging_bytes{{{I}}})")),
        plot("Heap of crumbd", "bytes",
             ("{{state}} {{instance}}", f"crumb_heap_bytes{{{I}}}"),
             text="Beside slabs and staging memory. free: kept by the allocator for later."),
        plot("Notices and events lost", "short",
             ("events", total("crumb_events_lost_total")),
             ("notices", total("crumb_notices_dropped_total")),
             ("hellos refused", total("crumb_hellos_refused_total"))),
        plot("Nodes", "short",
             ("in the view {{instance}}", f"crumb_view_nodes{{{I}}}"),
             ("view changes/s", total("crumb_view_changes_total")),
             ("refused/s", total("crumb_nodes_refused_total"))),
        plot("Pages from and to other nodes", "short",
             ("fetched", total("crumb_pulled_pages_total")),
             ("given to homes: {{outcome}}", rate("outcome", "crumb_pushed_pages_total")),
             ("not given: {{reason}}", rate("reason", "crumb_push_dropped_pages_total")),
             ("taken as a home", total("crumb_received_pages_total"))),
        plot("Pages on their way to their homes", "short",
             ("{{instance}}", f"crumb_push_queue_pages{{{I}}}"),
             text="A node that is draining has none left when it is done."),
        plot("State of etcd as the nodes see it", "short",
             ("{{state}}", f"sum by (state) (crumb_etcd_state{{{I}}})"),
             text="How many nodes say so; without etcd none says anything."),
        plot("Requests to other nodes", "reqps",
             ("sent", total("crumb_pulls_total")), ("late", total("crumb_pulls_late_total")),
             ("breaker open", total("crumb_breaker_skips_total")),
             ("too many at once", total("crumb_pulls_refused_total"))),
        plot("Referrals to the holders of pages", "short",
             ("calls to other nodes", total("crumb_peer_acquires_total")),
             ("calls without a response", total("crumb_peer_acquire_failures_total")),
             ("runs referred, as the reader", total("crumb_referred_runs_total")),
             ("runs referred, as the home", total("crumb_referrals_total")),
             ("holders that lacked the pages", total("crumb_holders_forgotten_total")),
             text="A home that holds no copy of a page, or serves too many, names nodes that do."),
        plot("Pages whose holders are known", "short",
             ("{{instance}}", f"crumb_directory_pages{{{I}}}"),
             ("forgotten for want of room/s", total("crumb_directory_evicted_pages_total")),
             text="The bound is cluster.directory_pages_max, of each node."),
        plot("Requests of nodes with as much as one may have", "reqps",
             ("{{what}}", rate("what", "crumb_peer_refused_total"))),
        plot("Pages over UCX by how they ended", "short",
             ("fetched: {{status}}", rate("status", "crumb_transport_pages_fetched_total")),
             ("served: {{status}}", rate("status", "crumb_transport_pages_served_total"))),
        plot("Fetches over UCX", "short",
             ("fetching", f"sum (crumb_transport_fetches_in_flight{{{I}}})"),
             ("serving", f"sum (crumb_transport_serves_in_flight{{{I}}})"),
             ("begun/s", total("crumb_transport_fetches_total")),
             ("served/s", total("crumb_transport_serves_total")),
             ("refused/s", total("crumb_transport_fetches_refused_total")),
             ("busy/s", total("crumb_transport_serves_refused_total"))),
        plot("UCX connections", "short",
             ("up", f"sum (crumb_transport_connections{{{I}}})"),
             ("opened/s", total("crumb_transport_connections_opened_total")),
             ("failed/s", total("crumb_transport_connections_failed_total")),
             ("refused/s", total("crumb_transport_connections_refused_total")),
             ("closed to end quarantine/s", total("crumb_transport_forced_closes_total"))),
        plot("Memory of the transport", "bytes",
             ("being sent", f"sum (crumb_transport_serve_bytes_in_flight{{{I}}})"),
             ("quarantined", f"sum (crumb_transport_quarantine_bytes{{{I}}})")),
        plot("Nodes that respond", "short",
             ("{{node}} from {{instance}}", f"crumb_peer_up{{{I}}}"),
             ("breakers opened/s {{node}}", rate("node", "crumb_breaker_opened_total"))),
    ]),
    ("SSD", [
        plot("Read and written", "Bps",
             ("{{op}}", rate("op", "crumb_stored_bytes_total", I + ',tier="ssd"'))),
        plot("Pages up and down", "short",
             ("promoted", total("crumb_promoted_pages_total")),
             ("demoted", total("crumb_demoted_pages_total")),
             ("made durable", total("crumb_durable_pages_total"))),
        plot("Stalls and admission", "short",
             ("dropped, disk lagged", total("crumb_write_queue_dropped_total")),
             ("admission rejects", total("crumb_admission_rejected_total")),
             ("waiting", f'sum (crumb_queue_depth{{{I},queue="ssd_write"}})')),
        plot("Recovery at the last start", "short",
             ("{{outcome}} pages {{instance}}", f"crumb_recovery_pages{{{I}}}"),
             ("seconds {{instance}}", f"crumb_recovery_seconds{{{I}}}")),
        plot("State of the tiers", "short",
             ("{{tier}} {{state}} {{instance}}", f"crumb_tier_state{{{I}}} == 1")),
    ]),
    ("Safety: all of it should be zero", [
        plot("Verify failures", "short",
             ("{{where}}", rate("where", "crumb_verify_failures_total"))),
        plot("Refused pages", "short",
             ("{{reason}}", rate("reason", "crumb_pages_refused_total", I + ',reason!="no_room"'))),
        plot("Pages lost before they were durable", "short",
             ("{{instance}}", rate("instance", "crumb_lost_pages_total")),
             text="Flush reports them: they left host memory before the disk had them."),
        plot("Pages withheld after drops that may have been missed", "short",
             ("keyspaces {{instance}}", f"crumb_withheld_keyspaces{{{I}}}"),
             ("nodes without a response {{instance}}", f"crumb_unsynced_nodes{{{I}}}")),
        plot("Slabs that tenants keep or pin", "short",
             ("revoked/s", total("crumb_slabs_revoked_total")),
             ("found pinned/s", total("crumb_slab_pinned_checks_total"))),
        plot("Oldest lease", "s", ("{{instance}}", f"crumb_lease_oldest_seconds{{{I}}}")),
        plot("Reaped", "short",
             ("sessions", total("crumb_sessions_reaped_total")),
             ("leases", total("crumb_leases_reaped_total"))),
        plot("Logged", "short", ("{{severity}}", rate("severity", "crumb_log_messages_total"))),
        plot("Keyspaces by state", "short",
             ("{{state}}", f"sum by (state) (crumb_keyspaces{{{I}}})")),
        plot("Frames and peers refused", "short",
             ("malformed frames", total("crumb_transport_frames_refused_total")),
             ("late frames", total("crumb_transport_frames_stale_total")),
             ("other wire version", total("crumb_transport_version_mismatches_total")),
             ("fetches without a right", total("crumb_peer_serve_refused_total"))),
        plot("Callers without a valid token", "short",
             ("{{reason}}", rate("reason", "crumb_unauthenticated_total")),
             ("TLS handshakes that failed", total("crumb_tls_handshake_failures_total")),
             ("tenants.file not read", total("crumb_tenant_reload_failures_total"))),
        plot("Time until certificates end", "s",
             ("{{setting}} {{instance}}",
              f"(crumb_certificate_expiry_timestamp_seconds{{{I}}} > 0) - time()"),
             text="Without TLS there is no line."),
        plot("Versions", "short",
             ("{{version}}", f"count by (version) (crumb_build_info{{{I}}})")),
    ]),
    ("Tenants and models", [
        plot("Amounts that clients reported, of each tenant", "short",
             ("{{amount}} of {{tenant}}",
              f"sum by (tenant, amount) (rate(crumb_tenant_reported_total{{{I}}}{RATE}))"),
             text="Clients are believed up to a rate. A tenant that reports nonsense is found here."),
        plot("Bytes of tenants", "bytes",
             ("{{tenant}}", f"sum by (tenant) (crumb_tenant_used_bytes{{{I}}})"),
             ("quota of {{tenant}}", f"sum by (tenant) (crumb_tenant_quota_bytes{{{I}}}) > 0"),
             text="Of pages in host memory and on SSD together. No line: no quota."),
        plot("Share of their quota", "percentunit",
             ("{{tenant}} {{instance}}",
              f"crumb_tenant_used_bytes{{{I}}} / (crumb_tenant_quota_bytes{{{I}}} > 0)")),
        plot("Pages refused: quota", "short",
             ("{{instance}}",
              rate("instance", "crumb_pages_refused_total", I + ',reason="quota"'))),
        plot("Hit rate by model", "percentunit",
             ("{{model}}", rate("model", "crumb_lookup_tokens_total", HITS)
                          + " / " + rate("model", "crumb_lookup_tokens_total"))),
        plot("Requested tokens by model", "short",
             ("{{model}}", rate("model", "crumb_lookup_tokens_total")), stack="normal"),
    ]),
]


def panel(number, place, spec):
    x, y = place
    return {
        "id": number, "type": "timeseries", "title": spec["title"], "description": spec["text"],
        "datasource": DATASOURCE, "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {
            "defaults": {"unit": spec["unit"], "min": 0,
                         "custom": {"fillOpacity": 60 if spec["stack"] else 8, "lineWidth": 1,
                                    "showPoints": "never",
                                    "stacking": {"mode": spec["stack"] or "none"}}},
            "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"},
                    "tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": [{"refId": chr(ord("A") + i), "datasource": DATASOURCE, "expr": expression,
                     "legendFormat": legend}
                    for i, (legend, expression) in enumerate(spec["queries"])],
    }


def variable(name, label, query):
    return {"name": name, "label": label, "type": "query", "datasource": DATASOURCE,
            "query": query, "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*",
            "current": {"text": "All", "value": "$__all"}}


def dashboard():
    panels = []
    y = 0
    for title, specs in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
                       "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}, "panels": []})
        y += 1
        for i, spec in enumerate(specs):
            place = (i * PANEL_WIDTH % WIDTH, y + i * PANEL_WIDTH // WIDTH * PANEL_HEIGHT)
            panels.append(panel(len(panels) + 1, place, spec))
        y += -(-len(specs) * PANEL_WIDTH // WIDTH) * PANEL_HEIGHT
    return {
        "title": "Crumb", "uid": "crumb", "tags": ["crumb"], "schemaVersion": 38, "version": 1,
        "editable": True, "refresh": "30s", "time": {"from": "now-6h", "to": "now"},
        "timezone": "", "graphTooltip": 1, "annotations": {"list": []}, "links": [],
        "templating": {"list": [
            {"name": "datasource", "label": "Prometheus", "type": "datasource",
             "query": "prometheus", "current": {"text": "Prometheus", "value": "crumb-prometheus"}},
            variable("instance", "crumbd", "label_values(crumb_build_info, instance)"),
            variable("model", "Model", "label_values(crumb_lookup_tokens_total, model)"),
            {"name": "prefill_tokens_per_second", "label": "Prefill tokens/s of a GPU",
             "type": "textbox", "query": "10000",
             "current": {"text": "10000", "value": "10000"}}]},
        "panels": panels,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail when the file differs")
    arguments = parser.parse_args()
    path = pathlib.Path(__file__).resolve().parent / "dashboards/crumb.json"
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not arguments.check:
        path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        print(f"{path} differs from the output of {sys.argv[0]}: run it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
