#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests rules and dashboard with a real Prometheus that scrapes a crumbd under load."""

import argparse
import json
import math
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.parse

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import alert_cases
from services import (ROOT, Crumbd, Load, Process, free_ports, http, make_certificates, prompt_of,
                      run_worker, wait_for)

PROMETHEUS = ROOT / "deploy/prometheus"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
DASHBOARD = ROOT / "deploy/grafana/dashboards/crumb.json"
ROW_COUNT = 10
PROMTOOL_SECONDS = 300  # two hours of every rule for every case
WAIT_SECONDS = 180  # seconds at most; a third of it is usual
VARIABLES = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*",
             "$prefill_tokens_per_second": "10000"}
SELECTOR = re.compile(r"\b(?:crumb[:_][a-z0-9_:]+|up)(?:\{[^}]*\})?")
BIN = ROOT / "build/release/bin"


def promtool(*arguments):
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True,
                          timeout=PROMTOOL_SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


def panels():
    return [p for p in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
            if p["type"] != "row"]


def documented_series():
    """{name: (type, labels)} of the tables of docs/metrics.md."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(crumb_\w+)(?:\{([\w,]+)\})?` \| (\w+) \|", text, re.MULTILINE)
    return {name: (kind, set(filter(None, labels.split(",")))) for name, labels, kind in rows}


def scraped_series(text):
    """{name: (type, labels)} of a scrape; the labels are those of all its samples."""
    found = {name: (kind, set())
             for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE)}
    for name, labels in re.findall(r"^(crumb_\w+)\{(.*)\} ", text, re.MULTILINE):
        name = name if name in found else re.sub(r"_(bucket|sum|count)$", "", name)
        found[name][1].update(set(re.findall(r'(\w+)="', labels)) - {"le"})
    return found


class FilesTest(unittest.TestCase):
    def test_configuration_and_rules_are_valid(self):
        code, output = promtool("check", "config", PROMETHEUS / "prometheus.yml")
        self.assertEqual(code, 0, output)
        self.assertNotIn("FAILED", output)

    def test_every_alert_fires_when_it_should_and_only_then(self):
        text = (PROMETHEUS / "rules/alerts.yml").read_text(encoding="utf-8")
        self.assertEqual(set(re.findall(r"- alert: (\w+)", text)), set(alert_cases.CASES))
        with tempfile.TemporaryDirectory() as folder:
            cases = pathlib.Path(folder) / "cases.yml"
            cases.write_text(json.dumps(alert_cases.unit_tests(RULES)), encoding="utf-8")
            code, output = promtool("test", "rules", cases)
        self.assertEqual(code, 0, output)

    def test_the_dashboard_is_what_its_script_makes(self):
        script = ROOT / "deploy/grafana/make_dashboard.py"
        done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True,
                              timeout=60, check=False)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_the_dashboard_has_ten_rows_and_no_empty_one(self):
        kinds = [p["type"] for p in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]]
        self.assertEqual(kinds.count("row"), ROW_COUNT)
        self.assertNotIn(("row", "row"), list(zip(kinds, kinds[1:] + ["row"])))
        ids = [p["id"] for p in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]]
        self.assertEqual(len(ids), len(set(ids)))

    def test_every_alert_has_an_entry_in_the_runbook(self):
        text = (PROMETHEUS / "rules/alerts.yml").read_text(encoding="utf-8")
        page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
        headings = set(re.findall(r"^### (\w+)$", page, re.MULTILINE))
        alerts = set(re.findall(r"- alert: (\w+)", text))
        self.assertEqual({h for h in headings if h.startswith("Crumb")}, alerts)
        anchors = set(re.findall(r"runbook: docs/operations.md#(\w+)", text))
        self.assertEqual(anchors, {alert.lower() for alert in alerts})


class Prometheus:
    """Debian's prometheus with the shipped configuration, except times and the one target."""

    def __init__(self, folder, target):
        config = (PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8")
        for old, new in (("15s", "1s"), ("localhost:9464", target),
                         ("rules/*.yml", f"{PROMETHEUS}/rules/*.yml")):
            assert old in config, old
            config = config.replace(old, new)
        (folder / "prometheus.yml").write_text(config, encoding="utf-8")
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        self.process = Process(
            ["prometheus", f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/tsdb", f"--web.listen-address={self.address}"],
            folder / "prometheus.log")
        wait_for("prometheus", self._ready)

    def _ready(self):
        assert self.process.alive(), self.process.tail()
        try:
            return http(f"http://{self.address}/-/ready")
        except OSError:
            return False

    def api(self, path, **arguments):
        try:
            text = http(f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(arguments)}")
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8")
        response = json.loads(text)
        if response["status"] != "success":
            raise AssertionError(f"{arguments}: {response.get('error')}")
        return response["data"]

    def has_numbers(self, query):
        """Whether the response contains a number; raises errors."""
        return any(math.isfinite(float(sample["value"][1]))
                   for sample in self.api("query", query=query)["result"])


class LiveTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="crumb-prometheus-")
        cls.addClassCleanup(cls.temporary.cleanup)
        folder = pathlib.Path(cls.temporary.name)
        # Enables everything that has series: another node, UCX, TLS, tenants.
        (folder / "other").mkdir()
        (folder / "secret").write_text("5" * 64)
        (folder / "tenants.json").write_text(json.dumps({"tenants": [
            {"name": "bounded", "token_sha256": "1" * 64, "quota_bytes": "1GiB"},
            {"name": "free", "token_sha256": "2" * 64}]}))
        make_certificates(folder, "crumbd.test")
        places = [f"127.0.0.1:{port}" for port in free_ports(4)]

        def extra(transport):
            return (f"  tls:\n    cert_file: {folder}/node.pem\n    key_file: {folder}/node.key\n"
                    f"    client_ca_file: {folder}/ca.pem\n    peer_name: crumbd.test\n",
                    f"cluster:\n  nodes: {json.dumps(places[:2])}\n"
                    f"  secret_file: {folder}/secret\n"
                    f"transport:\n  listen: {transport}\n"
                    f"tenants:\n  file: {folder}/tenants.json\n")

        # There is room for a few prompts only, so that pages are evicted.
        listen, rest = extra(places[2])
        cls.crumbd = Crumbd(BIN, folder, host_bytes="6MiB", tcp=places[0], extra=rest,
                            listen=listen)
        listen, rest = extra(places[3])
        cls.other = Crumbd(BIN, folder / "other", tcp=places[1], extra=rest, listen=listen)
        for crumbd in (cls.crumbd, cls.other):
            crumbd.start()
            cls.addClassCleanup(crumbd.stop)
        for number in range(3):
            run_worker(BIN, folder, prompt_of(number), "--flush")
        cls.crumbd.process.child.kill()
        cls.crumbd.process.child.wait()
        cls.crumbd.start()  # so that the first hits come from SSD
        cls.prometheus = Prometheus(folder, cls.crumbd.endpoints["admin"])
        cls.addClassCleanup(cls.prometheus.process.stop)
        cls.load = Load(BIN, folder, [0, 1, 0, 2, 3, 4, 0, 5, 6, 7, 8, 9, 10, 11])
        cls.addClassCleanup(cls.load.stop)

    def wait_for_numbers(self, queries):
        """Waits until every query has numbers."""
        waiting = dict.fromkeys(queries)

        def none_left():
            for query in list(waiting):
                if self.prometheus.has_numbers(query):
                    del waiting[query]
            return not waiting

        try:
            wait_for("results of all queries", none_left, seconds=WAIT_SECONDS)
        except AssertionError:
            self.fail(f"empty after {WAIT_SECONDS} s:\n" + "\n".join(waiting))

    def test_every_panel_shows_numbers(self):
        queries = []
        for panel in panels():
            for target in panel["targets"]:
                query = target["expr"]
                for name, value in VARIABLES.items():
                    query = query.replace(name, value)
                self.assertNotIn("$", query, panel["title"])
                queries.append(query)
        self.assertGreater(len(queries), 100)
        self.wait_for_numbers(queries)

    def test_the_documentation_lists_what_a_scrape_has(self):
        self.assertEqual(documented_series(), scraped_series(self.crumbd.get("/metrics")))

    def test_every_rule_is_evaluated_and_reads_series_that_exist(self):
        def rules():
            found = [rule for group in self.prometheus.api("rules")["groups"]
                     for rule in group["rules"]]
            return found if all(r["health"] != "unknown" for r in found) else None

        found = wait_for("all rules evaluated", rules)
        self.assertEqual(len(found), sum(f.read_text().count("expr:") for f in RULES))
        for rule in found:
            self.assertEqual((rule["name"], rule["health"], rule.get("lastError", "")),
                             (rule["name"], "ok", ""))
        self.wait_for_numbers([rule["name"] for rule in found if rule["type"] == "recording"])
        self.wait_for_numbers({selector for rule in found for selector in SELECTOR.findall(rule["query"])})

    def test_nothing_critical_fires(self):
        self.wait_for_numbers(["crumb_build_info"])
        alerts = self.prometheus.api("alerts")["alerts"]
        self.assertEqual([a["labels"] for a in alerts if a["labels"]["severity"] == "critical"], [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, default=BIN)
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
