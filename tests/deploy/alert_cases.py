# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Series over 130 minutes that make each alert fire, and series that do not.

Values are promtool's: a+bxn are n steps of one minute. `I` stands for the label instance="a".
"""

EVAL = "130m"


def flat(value):
    return f"{value}x140"


def rising(step):
    return f"0+{step}x140"


LATE_JUMP = "0x127 1x10"  # one event in the last minutes
EARLY_JUMP = "0x20 1x120"  # one event long ago

LOOKUPS = 'crumb_lookup_tokens_total{I,tier="%s"}'
PUTS = 'crumb_stored_bytes_total{I,op="put",tier="host"}'
LIFETIME = 'crumb_page_lifetime_seconds_bucket{I,tier="host",le="%s"}'
GAP = 'crumb_reuse_gap_seconds_bucket{I,tier="host",le="%s"}'
EXPIRY = 'crumb_certificate_expiry_timestamp_seconds{I,setting="listen.tls.cert_file"}'
DAY = 86400  # the cases begin at the instant 0 of Unix
ACQUIRE_BUCKET = 'crumb_request_seconds_bucket{I,rpc="Acquire",outcome="ok",le="%s"}'
ACQUIRES = 'crumb_request_seconds_count{I,rpc="Acquire",outcome="ok"}'
UNIQUE = 'crumb_unique_pages_estimate{I,window="1h"}'
REQUESTED = 'crumb_requested_pages_window{I,window="1h"}'
STATE = 'crumb_tier_state{I,tier="ssd",state="%s"}'
CAPACITY = 'crumb_capacity_bytes{I,tier="ssd"}'


def histogram(series, bounds, quick):
    """Observations that are all below bounds[0] (quick) or between the two bounds."""
    return {series % bounds[0]: rising(9 if quick else 0), series % bounds[1]: rising(9),
            series % "+Inf": rising(9)}


CASES = {  # alert: (series that make it fire, series that do not)
    "CrumbDown": ({'up{I,job="crumbd"}': flat(0)}, {'up{I,job="crumbd"}': flat(1)}),
    "CrumbVerifyFailures": ({'crumb_verify_failures_total{I,where="ssd"}': LATE_JUMP},
                            {'crumb_verify_failures_total{I,where="ssd"}': EARLY_JUMP}),
    "CrumbTierNotActive": (
        {STATE % "off": flat(1), STATE % "active": flat(0), CAPACITY: flat(5)},
        {STATE % "off": flat(1), STATE % "active": flat(0), CAPACITY: flat(0)}),  # none configured
    "CrumbNoHitsWhileStoring": (
        {LOOKUPS % "miss": rising(64), LOOKUPS % "host": flat(7), PUTS: rising(100)},
        {LOOKUPS % "miss": rising(64), LOOKUPS % "host": rising(64), PUTS: rising(100)}),
    "CrumbHitRateBelowCeiling": (
        {LOOKUPS % "miss": rising(90), LOOKUPS % "host": rising(10), UNIQUE: flat(50),
         REQUESTED: flat(100)},
        {LOOKUPS % "miss": rising(60), LOOKUPS % "host": rising(40), UNIQUE: flat(50),
         REQUESTED: flat(100)}),
    "CrumbTierTooSmall": (
        histogram(LIFETIME, (60, 300), True) | histogram(GAP, (60, 300), False),
        histogram(LIFETIME, (60, 300), False) | histogram(GAP, (60, 300), True)),
    "CrumbLeaseTooOld": ({"crumb_lease_oldest_seconds{I}": flat(2000)},
                         {"crumb_lease_oldest_seconds{I}": flat(900)}),
    "CrumbDeadlinesMissed": (
        {"crumb_deadline_exceeded_total{I}": rising(2), ACQUIRES: rising(100)},
        {"crumb_deadline_exceeded_total{I}": rising(1), ACQUIRES: rising(1000)}),
    "CrumbSlowAcquire": (histogram(ACQUIRE_BUCKET, (0.25, 0.5), False),
                         histogram(ACQUIRE_BUCKET, (0.25, 0.5), True)),
    "CrumbRejecting": ({'crumb_rejected_total{I,reason="requests"}': rising(1)},
                       {'crumb_rejected_total{I,reason="requests"}': EARLY_JUMP}),
    "CrumbPagesRefused": ({'crumb_pages_refused_total{I,reason="checksum"}': LATE_JUMP},
                          {'crumb_pages_refused_total{I,reason="no_room"}': LATE_JUMP}),
    "CrumbNoRoom": ({'crumb_pages_refused_total{I,reason="no_room"}': rising(1)},
                    {'crumb_pages_refused_total{I,reason="no_room"}': LATE_JUMP}),
    "CrumbSsdWriteStall": ({"crumb_write_queue_dropped_total{I}": rising(1)},
                           {"crumb_write_queue_dropped_total{I}": EARLY_JUMP}),
    "CrumbPublishDropped": ({"crumb_publish_dropped_pages_total{I}": rising(1)},
                            {"crumb_publish_dropped_pages_total{I}": LATE_JUMP}),
    "CrumbWorkersDying": ({"crumb_sessions_reaped_total{I}": rising(1)},
                          {"crumb_sessions_reaped_total{I}": LATE_JUMP}),
    "CrumbErrorsLogged": ({'crumb_log_messages_total{I,severity="error"}': LATE_JUMP},
                          {'crumb_log_messages_total{I,severity="warning"}': LATE_JUMP}),
    "CrumbKeyspaceBf16": ({'crumb_keyspaces{I,state="bf16"}': flat(1)},
                          {'crumb_keyspaces{I,state="active"}': flat(1)}),
    "CrumbAttentionError": (
        {'crumb_attention_error_sum{I,layer="0"}': rising(4),
         'crumb_attention_error_count{I,layer="0"}': rising(6)},
        {'crumb_attention_error_sum{I,layer="0"}': rising(2),
         'crumb_attention_error_count{I,layer="0"}': rising(6)}),
    "CrumbPeerDown": ({'crumb_peer_up{I,node="x"}': flat(0)},
                      {'crumb_peer_up{I,node="x"}': flat(1)}),
    "CrumbViewFlapping": ({"crumb_view_changes_total{I}": rising(1)},
                          {"crumb_view_changes_total{I}": LATE_JUMP}),
    "CrumbNodesRefused": ({"crumb_nodes_refused_total{I}": LATE_JUMP},
                          {"crumb_nodes_refused_total{I}": EARLY_JUMP}),
    "CrumbEtcdFailing": ({"crumb_etcd_failures_total{I}": rising(1)},
                         {"crumb_etcd_failures_total{I}": EARLY_JUMP}),
    "CrumbPushesDropped": (
        {'crumb_push_dropped_pages_total{I,reason="queue_full"}': rising(1)},
        {'crumb_push_dropped_pages_total{I,reason="generation"}': rising(1)}),
    "CrumbTransportFailing": ({"crumb_transport_connections_failed_total{I}": rising(1)},
                              {"crumb_transport_connections_failed_total{I}": LATE_JUMP}),
    "CrumbFramesRefused": ({"crumb_transport_frames_refused_total{I}": LATE_JUMP},
                           {"crumb_transport_frames_refused_total{I}": EARLY_JUMP}),
    "CrumbUnauthenticated": ({'crumb_unauthenticated_total{I,reason="expired"}': rising(1)},
                             {'crumb_unauthenticated_total{I,reason="expired"}': EARLY_JUMP}),
    "CrumbTenantsFileRefused": ({"crumb_tenant_reload_failures_total{I}": LATE_JUMP},
                                {"crumb_tenant_reload_failures_total{I}": EARLY_JUMP}),
    "CrumbTenantNearQuota": (
        {'crumb_tenant_used_bytes{I,tenant="x"}': flat(97),
         'crumb_tenant_quota_bytes{I,tenant="x"}': flat(100)},
        {'crumb_tenant_used_bytes{I,tenant="x"}': flat(97),
         'crumb_tenant_quota_bytes{I,tenant="x"}': flat(0)}),  # no quota
    "CrumbSlabsKept": ({'crumb_slabs{I,state="gone"}': flat(2)},
                       {'crumb_slabs{I,state="gone"}': "0+1x60 0x80"}),
    "CrumbHandshakesFailing": ({"crumb_tls_handshake_failures_total{I}": rising(1)},
                               {"crumb_tls_handshake_failures_total{I}": LATE_JUMP}),
    "CrumbCertificateExpiring": ({EXPIRY: flat(13 * DAY)}, {EXPIRY: flat(15 * DAY)}),
    "CrumbCertificateExpiresSoon": ({EXPIRY: flat(DAY)}, {EXPIRY: flat(0)}),  # 0: no TLS
    "CrumbVersionSkew": (
        {'crumb_build_info{I,version="1.0.0"}': flat(1),
         'crumb_build_info{instance="b",version="1.1.0"}': flat(1)},
        {'crumb_build_info{I,version="1.0.0"}': flat(1),
         'crumb_build_info{instance="b",version="1.0.0"}': flat(1)}),
}


def unit_tests(rule_files):
    """The input of `promtool test rules`."""

    def test(alert, series, fires):
        query = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)'
        return {
            "interval": "1m", "name": f"{alert} {'fires' if fires else 'is silent'}",
            "input_series": [{"series": name.replace("{I", '{instance="a"'), "values": values}
                             for name, values in series.items()],
            "promql_expr_test": [{"expr": query, "eval_time": EVAL, "exp_samples": [
                {"labels": "{}", "value": 1 if fires else 0}]}]}

    tests = []
    for alert, (firing, silent) in CASES.items():
        tests += [test(alert, firing, True), test(alert, silent, False)]
    return {"rule_files": [str(f) for f in rule_files], "evaluation_interval": "1m",
            "tests": tests}
