# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Renders the subset of Kustomize that deploy/k8s uses, for machines without a new kubectl.

resources (files and folders), namespace, configMapGenerator from files without hash (also behavior:
replace), patches by path (strategic merge). Anything else is an error. With kubectl at hand tests
compare both.
"""

import pathlib

import yaml

KNOWN = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "generatorOptions",
         "patches"}
CLUSTER_KINDS = {"Namespace"}
# Lists that a strategic merge patch merges, and their keys.
MERGE_KEYS = {"containers": "name", "initContainers": "name", "volumes": "name", "env": "name",
              "ports": "containerPort", "volumeMounts": "mountPath"}


def merge(base, patch, field=""):
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for name, value in patch.items():
            if value is None:
                merged.pop(name, None)
            else:
                merged[name] = merge(merged.get(name), value, name)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and field in MERGE_KEYS:
        key = MERGE_KEYS[field]
        merged = {entry[key]: entry for entry in base}
        for entry in patch:
            merged[entry[key]] = merge(merged.get(entry[key]), entry)
        return list(merged.values())
    if isinstance(patch, dict):
        return merge({}, patch)  # drops its nulls
    return patch


def identity(document):
    return document["kind"], document["metadata"]["name"]


def render(folder):
    """The documents of a kustomization folder by (kind, name)."""
    folder = pathlib.Path(folder)
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    unknown = set(kustomization) - KNOWN
    assert not unknown, f"{folder}: {unknown} is beyond this renderer"
    documents = {}
    for resource in kustomization.get("resources", []):
        path = folder / resource
        if path.is_dir():
            found = render(path)
        else:
            found = {identity(d): d
                     for d in yaml.safe_load_all(path.read_text(encoding="utf-8")) if d}
        repeated = set(found) & set(documents)
        assert not repeated, f"{folder}: {repeated} twice"
        documents |= found
    for generator in kustomization.get("configMapGenerator", []):
        assert kustomization["generatorOptions"] == {"disableNameSuffixHash": True}, folder
        document = {"apiVersion": "v1", "kind": "ConfigMap",
                    "metadata": {"name": generator["name"]},
                    "data": {name: (folder / name).read_text(encoding="utf-8")
                             for name in generator["files"]}}
        replaces = generator.get("behavior", "create") == "replace"
        assert (identity(document) in documents) == replaces, f"{folder}: {generator['name']}"
        documents[identity(document)] = document
    for patch in kustomization.get("patches", []):
        assert set(patch) == {"path"}, folder
        change = yaml.safe_load((folder / patch["path"]).read_text(encoding="utf-8"))
        documents[identity(change)] = merge(documents[identity(change)], change)
    for kind, _ in documents:
        if kind not in CLUSTER_KINDS:
            documents[kind, _]["metadata"]["namespace"] = kustomization["namespace"]
    return documents
