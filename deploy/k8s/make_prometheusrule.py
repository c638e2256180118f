#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Writes base/prometheusrule.yaml: the rules of deploy/prometheus in the format of the Prometheus
operator."""

import pathlib

import yaml

HEAD = """\
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Made of deploy/prometheus/rules by make_prometheusrule.py.
"""


def document(rules):
    groups = [group for path in sorted(rules.glob("*.yml"))
              for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]
    return {"apiVersion": "monitoring.coreos.com/v1", "kind": "PrometheusRule",
            "metadata": {"name": "crumb"}, "spec": {"groups": groups}}


def main():
    here = pathlib.Path(__file__).resolve().parent
    text = yaml.safe_dump(document(here.parent / "prometheus/rules"), sort_keys=False, width=96)
    (here / "base/prometheusrule.yaml").write_text(HEAD + text, encoding="utf-8")


if __name__ == "__main__":
    main()
