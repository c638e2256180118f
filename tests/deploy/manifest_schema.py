# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The fields that Kubernetes and the Prometheus operator accept in the kinds of deploy/k8s.

Our own description of the published API references (Kubernetes 1.29; monitoring.coreos.com/v1 of
the operator 0.70), of the fields that a manifest here may want and no more: a field that is not
listed is an error, as it is for a server with strict validation. A name that ends in ! is required.
"""

import re

# A duration of Prometheus; a name as DNS knows it; a label's key and value.
DURATION = re.compile(r"0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
LABEL_KEY = re.compile(r"([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
PORT_NAME = re.compile(r"(?=.*[a-z])[a-z0-9]([a-z0-9-]{0,13}[a-z0-9])?")
PROMETHEUS_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")
PATH = re.compile(r"/.*")
TEXT = re.compile(r"(?s).*")
FILLED = re.compile(r"(?s).+")


class Choice(tuple):
    """Accepts one of these values."""


class Map(tuple):
    """(pattern of names, pattern of values)."""


class Each(tuple):
    """A list of (entry,) or, if entries must differ in a field, of (entry, field)."""


class Either(tuple):
    """Accepts one of these descriptions."""


INT = range(-(2**31), 2**63)
COUNT = range(0, 2**31)
PORT = range(1, 65536)
LABELS = Map((LABEL_KEY, LABEL_VALUE))
STRINGS = Each((TEXT,))
QUANTITIES = Map((TEXT, Either((QUANTITY, COUNT))))
OPERATOR = Choice(("In", "NotIn", "Exists", "DoesNotExist"))
SELECTOR = {"matchLabels": LABELS,
            "matchExpressions": Each(({"key!": LABEL_KEY, "operator!": OPERATOR,
                                       "values": STRINGS},))}
METADATA = {"name!": NAME, "namespace": NAME, "labels": LABELS,
            "annotations": Map((LABEL_KEY, TEXT))}
POD_METADATA = {"labels": LABELS, "annotations": Map((LABEL_KEY, TEXT))}

HANDLER = {"httpGet": {"path": PATH, "port!": Either((PORT, PORT_NAME)), "scheme": TEXT},
           "exec": {"command": STRINGS}, "tcpSocket": {"port!": Either((PORT, PORT_NAME))}}
PROBE = HANDLER | {"initialDelaySeconds": COUNT, "periodSeconds": COUNT, "timeoutSeconds": COUNT,
                   "successThreshold": COUNT, "failureThreshold": COUNT}
SECCOMP = {"type!": Choice(("RuntimeDefault", "Unconfined", "Localhost")), "localhostProfile": TEXT}
CONTAINER = {
    "name!": NAME, "image!": FILLED, "imagePullPolicy": Choice(("Always", "Never", "IfNotPresent")),
    "command": STRINGS, "args": STRINGS, "workingDir": PATH,
    "env": Each(({"name!": FILLED, "value": TEXT,
                  "valueFrom": {"fieldRef": {"fieldPath!": FILLED, "apiVersion": TEXT},
                                "secretKeyRef": {"name!": NAME, "key!": FILLED}}}, "name")),
    "ports": Each(({"name": PORT_NAME, "containerPort!": PORT, "hostPort": PORT,
                    "protocol": Choice(("TCP", "UDP", "SCTP"))}, "containerPort")),
    "startupProbe": PROBE, "readinessProbe": PROBE, "livenessProbe": PROBE,
    "lifecycle": {"preStop": HANDLER, "postStart": HANDLER},
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
    "securityContext": {
        "allowPrivilegeEscalation": bool, "readOnlyRootFilesystem": bool, "runAsNonRoot": bool,
        "runAsUser": COUNT, "runAsGroup": COUNT, "privileged": bool, "seccompProfile": SECCOMP,
        "capabilities": {"add": STRINGS, "drop": STRINGS}},
    "volumeMounts": Each(({"name!": NAME, "mountPath!": PATH, "readOnly": bool, "subPath": TEXT},
                          "mountPath")),
}
# Only init containers have restartPolicy, which makes them sidecars (by default since 1.29).
INIT_CONTAINER = CONTAINER | {"restartPolicy": Choice(("Always",))}
MODE = range(0, 0o1000)
VOLUME = {
    "name!": NAME, "emptyDir": {"medium": Choice(("", "Memory", "HugePages")),
                                "sizeLimit": QUANTITY},
    "hostPath": {"path!": PATH, "type": Choice(("", "DirectoryOrCreate", "Directory", "File"))},
    "configMap": {"name!": NAME, "defaultMode": MODE, "optional": bool},
    "secret": {"secretName!": NAME, "defaultMode": MODE, "optional": bool},
}
POD = {
    "serviceAccountName": NAME, "automountServiceAccountToken": bool,
    "terminationGracePeriodSeconds": COUNT, "hostIPC": bool, "hostPID": bool, "hostNetwork": bool,
    "shareProcessNamespace": bool, "nodeSelector": LABELS, "priorityClassName": NAME,
    "tolerations": Each(({"key": LABEL_KEY, "operator": Choice(("Exists", "Equal")),
                          "value": LABEL_VALUE, "effect": TEXT},)),
    "securityContext": {"runAsUser": COUNT, "runAsGroup": COUNT, "runAsNonRoot": bool,
                        "fsGroup": COUNT, "supplementalGroups": Each((COUNT,)),
                        "seccompProfile": SECCOMP},
    "initContainers": Each((INIT_CONTAINER, "name")), "containers!": Each((CONTAINER, "name")),
    "volumes": Each((VOLUME, "name")),
}
TEMPLATE = {"metadata": POD_METADATA, "spec!": POD}
CLAIM = {"metadata!": METADATA,
         "spec!": {"accessModes": STRINGS, "storageClassName": NAME,
                   "resources": {"requests": QUANTITIES}}}

NET_PORT = {"port": Either((PORT, PORT_NAME)), "endPort": PORT,
            "protocol": Choice(("TCP", "UDP", "SCTP"))}
NET_PEER = {"podSelector": SELECTOR, "namespaceSelector": SELECTOR,
            "ipBlock": {"cidr!": FILLED, "except": STRINGS}}

SECRET_KEY = {"name": NAME, "key!": FILLED, "optional": bool}
ACTION = Choice(word for name in ("replace", "keep", "drop", "hashmod", "labelmap", "labeldrop",
                                  "labelkeep", "lowercase", "uppercase", "keepequal", "dropequal")
                for word in (name, name.capitalize()))
RELABELING = {"sourceLabels": Each((PROMETHEUS_NAME,)), "separator": TEXT, "targetLabel": TEXT,
              "regex": TEXT, "modulus": COUNT, "replacement": TEXT, "action": ACTION}
POD_ENDPOINT = {
    "port": FILLED, "portNumber": PORT, "path": PATH, "scheme": Choice(("http", "https")),
    "params": Map((TEXT, TEXT)), "interval": DURATION, "scrapeTimeout": DURATION,
    "honorLabels": bool, "honorTimestamps": bool, "followRedirects": bool, "enableHttp2": bool,
    "filterRunning": bool, "bearerTokenSecret": SECRET_KEY,
    "relabelings": Each((RELABELING,)), "metricRelabelings": Each((RELABELING,))}
RULE = {"alert": FILLED, "record": PROMETHEUS_NAME, "expr!": Either((FILLED, INT)),
        "for": DURATION, "keep_firing_for": DURATION, "labels": Map((PROMETHEUS_NAME, TEXT)),
        "annotations": Map((PROMETHEUS_NAME, TEXT))}


def kind(api_version, **parts):
    """A document of this kind; an underscore stands for the ! of a required part."""
    return {"apiVersion!": Choice((api_version,)), "kind!": FILLED, "metadata!": METADATA} | {
        name.replace("_", "!"): value for name, value in parts.items()}


KINDS = {
    "Namespace": kind("v1"),
    "ServiceAccount": kind("v1", automountServiceAccountToken=bool),
    "ConfigMap": kind("v1", data=Map((re.compile(r"[-._a-zA-Z0-9]+"), TEXT))),
    "Service": kind("v1", spec_={
        "clusterIP": TEXT, "publishNotReadyAddresses": bool, "selector": LABELS,
        "ports": Each(({"name": PORT_NAME, "port!": PORT, "targetPort": Either((PORT, PORT_NAME)),
                        "protocol": TEXT}, "port"))}),
    "Pod": kind("v1", spec_=POD),
    "PodDisruptionBudget": kind("policy/v1", spec_={
        "maxUnavailable": Either((COUNT, TEXT)), "minAvailable": Either((COUNT, TEXT)),
        "selector": SELECTOR}),
    "DaemonSet": kind("apps/v1", spec_={
        "selector!": SELECTOR, "template!": TEMPLATE, "minReadySeconds": COUNT,
        "updateStrategy": {"type": Choice(("RollingUpdate", "OnDelete")), "rollingUpdate": {
            "maxUnavailable": Either((COUNT, TEXT)), "maxSurge": Either((COUNT, TEXT))}}}),
    "Deployment": kind("apps/v1", spec_={
        "replicas": COUNT, "selector!": SELECTOR, "template!": TEMPLATE}),
    "StatefulSet": kind("apps/v1", spec_={
        "replicas": COUNT, "serviceName!": NAME, "selector!": SELECTOR, "template!": TEMPLATE,
        "podManagementPolicy": Choice(("Parallel", "OrderedReady")),
        "volumeClaimTemplates": Each((CLAIM,))}),
    "NetworkPolicy": kind("networking.k8s.io/v1", spec_={
        "podSelector!": SELECTOR, "policyTypes": Each((Choice(("Ingress", "Egress")),)),
        "ingress": Each(({"ports": Each((NET_PORT,)), "from": Each((NET_PEER,))},)),
        "egress": Each(({"ports": Each((NET_PORT,)), "to": Each((NET_PEER,))},))}),
    "PodMonitor": kind("monitoring.coreos.com/v1", spec_={
        "selector!": SELECTOR, "podMetricsEndpoints!": Each((POD_ENDPOINT,)), "jobLabel": TEXT,
        "podTargetLabels": STRINGS, "sampleLimit": COUNT, "targetLimit": COUNT,
        "labelLimit": COUNT, "namespaceSelector": {"any": bool, "matchNames": Each((NAME,))}}),
    "PrometheusRule": kind("monitoring.coreos.com/v1", spec_={
        "groups": Each(({"name!": FILLED, "interval": DURATION, "limit": COUNT,
                         "labels": Map((PROMETHEUS_NAME, TEXT)),
                         "rules": Each((RULE,))}, "name"))}),
}


def _map_problems(value, spec, where):
    if not isinstance(value, dict):
        yield f"{where}: not a map but {value!r}"
        return
    for name, entry in value.items():
        yield from problems(name, spec[0], f"{where}, the name {name!r}")
        yield from problems(entry, spec[1], f"{where}.{name}")


def _list_problems(value, spec, where):
    if not isinstance(value, list):
        yield f"{where}: not a list but {value!r}"
        return
    for i, entry in enumerate(value):
        yield from problems(entry, spec[0], f"{where}[{i}]")
    if len(spec) == 2:
        names = [entry.get(spec[1]) for entry in value if isinstance(entry, dict)]
        for name in {n for n in names if names.count(n) > 1}:
            yield f"{where}: {spec[1]} {name!r} twice"


def _object_problems(value, spec, where):
    if not isinstance(value, dict):
        yield f"{where}: not an object but {value!r}"
        return
    fields = {name.rstrip("!"): entry for name, entry in spec.items()}
    for name in sorted(set(map(str, value)) - set(fields)):
        yield f"{where}: unknown field {name!r}"
    for name in spec:
        if name.endswith("!") and name[:-1] not in value:
            yield f"{where}: {name[:-1]} is missing"
    for name, entry in value.items():
        if name in fields:
            yield from problems(entry, fields[name], f"{where}.{name}")


def problems(value, spec, where):
    """The errors of a value, as lines that begin with its place."""
    if isinstance(spec, dict):
        yield from _object_problems(value, spec, where)
    elif isinstance(spec, Map):
        yield from _map_problems(value, spec, where)
    elif isinstance(spec, Each):
        yield from _list_problems(value, spec, where)
    elif isinstance(spec, Either):
        if all(any(True for _ in problems(value, one, where)) for one in spec):
            yield f"{where}: {value!r} fits nothing that may stand here"
    elif isinstance(spec, Choice):
        if value not in spec:
            yield f"{where}: {value!r} is none of {', '.join(map(str, spec))}"
    elif isinstance(spec, re.Pattern):
        if not isinstance(value, str) or not spec.fullmatch(value):
            yield f"{where}: {value!r} is not text like {spec.pattern}"
    elif spec is bool:
        if not isinstance(value, bool):
            yield f"{where}: {value!r} is not true or false"
    elif isinstance(value, bool) or not isinstance(value, int) or value not in spec:
        yield f"{where}: {value!r} is no number from {spec.start} to {spec.stop - 1}"


def _deeper_problems(document, where):
    """The checks of the servers beyond the shape."""
    spec = document.get("spec", {})
    if "template" in spec and "selector" in spec:
        labels = spec["template"].get("metadata", {}).get("labels", {})
        if not spec["selector"].get("matchLabels", {}).items() <= labels.items():
            yield f"{where}: the selector does not match the template's labels"
    pod = spec.get("template", {}).get("spec", spec)
    volumes = {v.get("name") for v in pod.get("volumes", [])}
    volumes |= {c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])}
    for container in pod.get("initContainers", []) + pod.get("containers", []):
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"{where}: {container['name']} mounts {mount['name']}, which is no volume"
    for volume in pod.get("volumes", []):
        if len(volume) != 2:
            yield f"{where}: volume {volume.get('name')} has {len(volume) - 1} sources"
    for group in spec.get("groups", []):
        for rule in group.get("rules", []):
            if ("alert" in rule) == ("record" in rule):
                yield f"{where}: a rule of {group['name']} is neither alert nor record, or both"
            if "record" in rule and ("for" in rule or "annotations" in rule):
                yield f"{where}: {rule['record']} has fields of an alert"


def check(document):
    """The errors of a manifest; empty if it would be accepted."""
    name = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    spec = KINDS.get(document.get("kind"))
    if spec is None:
        return [f"{name}: this kind is not described in manifest_schema.py"]
    return list(problems(document, spec, name)) or list(_deeper_problems(document, name))
