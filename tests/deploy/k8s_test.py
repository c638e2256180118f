#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests the rendered overlays of deploy/k8s against crumbd and against each other."""

import argparse
import base64
import copy
import json
import pathlib
import re
import shutil
import ssl
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import kustomize
import manifest_schema
from services import ROOT, Crumbd, Process, free_ports, http, make_certificates, wait_for

sys.path.insert(0, str(ROOT / "deploy/k8s"))
import make_prometheusrule

BIN = ROOT / "build/release/bin"
K8S = ROOT / "deploy/k8s"
OVERLAYS = ("daemonset", "sidecar", "cluster", "vllm")
WITHOUT_CRUMBD = ("vllm-native",)
# Settings without which an overlay does not work.
NEEDS = {"cluster": (("cluster", "etcd"), ("transport", "listen"))}
UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
BESIDE_BYTES = 512 << 20  # part of a memory limit beside the host tier
FORBIDDEN_IN_POD = ("hostIPC", "hostPID", "hostNetwork", "shareProcessNamespace")
SOCKET_DIR = "/run/crumb"
ENDPOINT = ("spec", "podMetricsEndpoints", 0)
RULE = ("spec", "groups", 0, "rules", 0)
CRUMBD = ("spec", "template", "spec", "containers", 0)
BROKEN = (  # overlay, document, place, new value (None: gone), expected complaint
    ("daemonset", ("PodMonitor", "crumbd"), ("spec", "selector"), None, "selector is missing"),
    ("daemonset", ("PodMonitor", "crumbd"), (*ENDPOINT, "interval"), "15 s", "not text like"),
    ("daemonset", ("PodMonitor", "crumbd"), (*ENDPOINT, "intervall"), "15s", "unknown field"),
    ("daemonset", ("PodMonitor", "crumbd"), (*ENDPOINT, "port"), 9464, "port: 9464 is not text"),
    ("daemonset", ("PodMonitor", "crumbd"), (*ENDPOINT, "relabelings", 0, "action"), "rename",
     "'rename' is none of"),
    ("daemonset", ("PodMonitor", "crumbd"), ("apiVersion",), "v1", "apiVersion: 'v1' is none of"),
    ("daemonset", ("PrometheusRule", "crumb"), (*RULE, "expr"), None, "expr is missing"),
    ("daemonset", ("PrometheusRule", "crumb"), (*RULE, "for"), "1 minute", "not text like"),
    ("daemonset", ("PrometheusRule", "crumb"), (*RULE, "labels", "severity"), 1, "1 is not text"),
    ("daemonset", ("PrometheusRule", "crumb"), (*RULE, "record"), "a:b", "or both"),
    ("daemonset", ("PrometheusRule", "crumb"), ("spec", "groups", 1, "name"), "crumb_alerts",
     "'crumb_alerts' twice"),
    ("cluster", ("NetworkPolicy", "crumbd-peers"), ("spec", "ingress", 0, "ports", 0, "port"),
     70000, "fits nothing"),
    ("cluster", ("NetworkPolicy", "crumbd-peers"), ("spec", "policyTypes", 0), "Both",
     "none of Ingress, Egress"),
    ("cluster", ("NetworkPolicy", "crumbd-peers"), ("spec", "podSelector"), None, "is missing"),
    ("daemonset", ("NetworkPolicy", "crumbd"), ("spec", "ingress", 0, "form"), [], "unknown field"),
    ("daemonset", ("DaemonSet", "crumbd"), (*CRUMBD, "securityContext", "runAsNonRoot"), "yes",
     "'yes' is not true or false"),
    ("daemonset", ("DaemonSet", "crumbd"), (*CRUMBD, "resources", "limits", "memory"), "17 GB",
     "fits nothing"),
    ("daemonset", ("DaemonSet", "crumbd"), (*CRUMBD, "volumeMounts", 0, "name"), "nothing",
     "mounts nothing, which is no volume"),
    ("daemonset", ("DaemonSet", "crumbd"), ("spec", "template", "metadata", "labels"), {},
     "does not match"),
    ("daemonset", ("DaemonSet", "crumbd"), ("kind",), "DeamonSet", "not described"),
    ("sidecar", ("Deployment", "worker"), ("spec", "template", "spec", "initContainers", 0,
                                           "restartPolicy"), "OnFailure", "none of Always"),
    ("sidecar", ("Deployment", "worker"), ("spec", "replicas"), "1", "no number"),
)


def bytes_of(text):
    number, unit = re.fullmatch(r"(\d+)([KMGT]i)?B?", str(text)).groups()
    return int(number) * UNITS[unit or ""]


def normal(value):
    """Sorts lists of named objects, whose order Kubernetes ignores."""
    if isinstance(value, dict):
        return {name: normal(entry) for name, entry in value.items()}
    if isinstance(value, list):
        entries = [normal(entry) for entry in value]
        named = all(isinstance(e, dict) and ("name" in e or "mountPath" in e) for e in entries)
        key = lambda e: (str(e.get("mountPath", "")), str(e.get("name", "")))
        return sorted(entries, key=key) if named else entries
    return value


def kubectl_renders():
    """Whether there is a kubectl with Kustomize 4 or newer; older ones read other files."""
    if not shutil.which("kubectl"):
        return False
    output = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True,
                            timeout=60, check=False).stdout
    version = re.search(r"Kustomize Version: v(\d+)", output)
    return bool(version) and int(version[1]) >= 4


class Overlay:
    def __init__(self, name):
        self.name = name
        self.documents = kustomize.render(K8S / "overlays" / name)
        self.pods = {key: d["spec"]["template"] for key, d in self.documents.items()
                     if "template" in d.get("spec", {})}
        self.policies = [d for (kind, _), d in self.documents.items() if kind == "NetworkPolicy"]

    def crumbd_pods(self):
        for template in self.pods.values():
            spec = template["spec"]
            for container in spec.get("initContainers", []) + spec["containers"]:
                if container["name"] == "crumbd":
                    yield template, container

    def configuration(self, folder):
        """The ConfigMap's crumbd.yaml, completed like the cluster's init container does it."""
        text = self.documents["ConfigMap", "crumbd"]["data"]["crumbd.yaml"]
        path = pathlib.Path(folder) / "crumbd.yaml"
        path.write_text(text.replace("POD_IP", "127.0.0.1").replace("NODE_NAME", "node-1"))
        return path


def crumbd(*arguments):
    return subprocess.run([BIN / "crumbd", *arguments], capture_output=True, text=True, timeout=60,
                          check=False)


class K8sTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory(prefix="crumb-k8s-")
        self.addCleanup(self.temporary.cleanup)

    def overlays(self):
        """The overlays whose settings this crumbd knows."""
        known = yaml.safe_load(crumbd("--print-config").stdout)
        for name in OVERLAYS:
            missing = [f"{section}.{key}" for section, key in NEEDS.get(name, ())
                       if key not in known.get(section, {})]
            if missing:
                print(f"overlay {name} left out: this crumbd has no {', '.join(missing)}")
            else:
                yield Overlay(name)

    def test_kubectl_renders_the_same(self):
        if not kubectl_renders():
            self.skipTest("no kubectl with Kustomize 4 or newer; the tests' own renderer is used")
        for name in OVERLAYS + WITHOUT_CRUMBD:
            with self.subTest(overlay=name):
                output = subprocess.run(["kubectl", "kustomize", K8S / "overlays" / name],
                                        capture_output=True, text=True, timeout=60, check=True)
                theirs = {kustomize.identity(d): d for d in yaml.safe_load_all(output.stdout)}
                ours = Overlay(name).documents
                self.assertEqual(set(ours), set(theirs))
                for key, document in ours.items():
                    self.assertEqual(normal(document), normal(theirs[key]), key)

    def test_the_servers_would_take_every_manifest(self):
        for overlay in map(Overlay, OVERLAYS + WITHOUT_CRUMBD):
            for key, document in overlay.documents.items():
                self.assertEqual(manifest_schema.check(document), [], (overlay.name, *key))
        example = K8S / "overlays/daemonset/worker-example.yaml"
        self.assertEqual(manifest_schema.check(yaml.safe_load(example.read_text())), [])

    def test_a_manifest_with_an_error_would_not_be_taken(self):
        for overlay, key, path, value, complaint in BROKEN:
            document = copy.deepcopy(Overlay(overlay).documents[key])
            place = document
            for step in path[:-1]:
                place = place[step]
            if value is None:
                del place[path[-1]]
            else:
                place[path[-1]] = value
            with self.subTest(path=path):
                self.assertRegex("\n".join(manifest_schema.check(document)), complaint)

    def test_crumbd_takes_the_configuration(self):
        for overlay in self.overlays():
            done = crumbd("--config", overlay.configuration(self.temporary.name), "--check-config")
            self.assertEqual((overlay.name, done.returncode, done.stderr), (overlay.name, 0, ""))

    def test_mounts_ports_and_limits_fit_the_configuration(self):
        for overlay in self.overlays():
            done = crumbd("--config", overlay.configuration(self.temporary.name), "--print-config")
            settings = yaml.safe_load(done.stdout)
            pods = list(overlay.crumbd_pods())
            self.assertEqual(len(pods), 1)
            template, container = pods[0]
            spec = template["spec"]
            mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
            volumes = {v["name"]: v for v in spec["volumes"]}
            self.assertLessEqual(set(mounts.values()), set(volumes))
            self.assertIn(settings["listen"]["socket_dir"], mounts)
            self.assertIn(container["args"][1].rpartition("/")[0], mounts)
            ssd = settings["store"]["ssd"]
            folder = max((m for m in mounts if ssd["path"].startswith(m + "/")), key=len)
            room = volumes[mounts[folder]].get("emptyDir", {}).get("sizeLimit")
            if room:
                self.assertGreaterEqual(bytes_of(room), bytes_of(ssd["bytes_max"]))
            needed = bytes_of(settings["store"]["host"]["bytes_max"]) + BESIDE_BYTES
            if settings.get("transport", {}).get("listen"):
                needed += sum(bytes_of(settings["transport"][name])
                              for name in ("serve_bytes_max", "quarantine_bytes_max"))
            limit = bytes_of(container["resources"]["limits"]["memory"])
            self.assertGreaterEqual(limit, needed)
            ports = {p["name"]: p["containerPort"] for p in container["ports"]}
            host, _, port = settings["admin"]["listen"].rpartition(":")
            self.assertEqual((host, int(port)), ("0.0.0.0", ports["admin"]))
            for section, name in (("listen", "tcp"), ("transport", "listen")):
                place = settings.get(section, {}).get(name)
                if place:
                    self.assertIn(int(place.rpartition(":")[2]), ports.values())

    def test_vllm_finds_crumbd(self):
        overlay = Overlay("vllm")
        done = crumbd("--config", overlay.configuration(self.temporary.name), "--print-config")
        socket_dir = yaml.safe_load(done.stdout)["listen"]["socket_dir"]
        spec = overlay.pods["Deployment", "worker"]["spec"]
        engine = spec["containers"][0]
        options = dict(argument.removeprefix("--").split("=", 1) for argument in engine["args"])
        transfer = json.loads(options["kv-transfer-config"])
        self.assertEqual(transfer["kv_connector_extra_config"]["socket_dir"], socket_dir)
        mounts = {m["mountPath"]: m["name"] for m in engine["volumeMounts"]}
        crumbds = {m["mountPath"]: m["name"]
                   for m in next(overlay.crumbd_pods())[1]["volumeMounts"]}
        self.assertEqual(mounts[socket_dir], crumbds[socket_dir])
        self.assertIn(int(options["port"]), [p["containerPort"] for p in engine["ports"]])
        # The class is where the module path says.
        module = ROOT / "python/src" / transfer["kv_connector_module_path"].replace(".", "/")
        source = (module / "__init__.py").read_text() + (module / "connector.py").read_text()
        self.assertIn(f"class {transfer['kv_connector']}(", source)

    def test_the_grace_covers_the_stop(self):
        for overlay in self.overlays():
            done = crumbd("--config", overlay.configuration(self.temporary.name), "--print-config")
            grace = yaml.safe_load(done.stdout)["stop_grace"]
            seconds = int(re.fullmatch(r"(\d+)s", grace)[1])
            for template, _ in overlay.crumbd_pods():
                self.assertGreater(template["spec"]["terminationGracePeriodSeconds"], 2 * seconds)

    def test_probes_request_pages_that_crumbd_serves(self):
        for overlay in map(Overlay, OVERLAYS):
            for _, container in overlay.crumbd_pods():
                paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"]
                         for kind in ("startup", "readiness", "liveness")}
                self.assertEqual(paths, {"startup": "/readyz", "readiness": "/readyz",
                                         "liveness": "/healthz"})
                for kind in paths:
                    self.assertEqual(container[f"{kind}Probe"]["httpGet"]["port"], "admin")

    def test_pods_request_no_rights(self):
        user = re.search(r"^USER (\d+):(\d+)$",
                         (ROOT / "deploy/container/Containerfile").read_text(), re.MULTILINE)
        for overlay in map(Overlay, OVERLAYS + WITHOUT_CRUMBD):
            for template in overlay.pods.values():
                spec = template["spec"]
                for field in FORBIDDEN_IN_POD:
                    self.assertNotIn(field, spec)
                self.assertFalse(spec["automountServiceAccountToken"])
                self.assertEqual(spec["securityContext"]["seccompProfile"],
                                 {"type": "RuntimeDefault"})
                for container in spec.get("initContainers", []) + spec["containers"]:
                    context = container["securityContext"]
                    self.assertIs(context["allowPrivilegeEscalation"], False)
                    self.assertNotIn("privileged", context)
                    self.assertEqual(context["capabilities"]["drop"], ["ALL"])
                    if container["name"] == "folders":  # runs before crumbd, and only that
                        self.assertLessEqual(set(context["capabilities"]["add"]),
                                             {"CHOWN", "FOWNER"})
                        continue
                    self.assertIs(context["runAsNonRoot"], True)
                    self.assertNotIn("add", context["capabilities"])
            for _, container in overlay.crumbd_pods():
                context = container["securityContext"]
                self.assertIs(context["readOnlyRootFilesystem"], True)
                self.assertEqual((str(context["runAsUser"]), str(context["runAsGroup"])),
                                 user.groups())
                resources = container["resources"]
                self.assertFalse([r for part in resources.values() for r in part if "gpu" in r])

    def test_prometheus_finds_every_crumbd(self):
        for overlay in map(Overlay, OVERLAYS):
            monitor = overlay.documents["PodMonitor", "crumbd"]["spec"]
            for template, container in overlay.crumbd_pods():
                labels = template["metadata"]["labels"]
                self.assertLessEqual(monitor["selector"]["matchLabels"].items(), labels.items())
                ports = {p["name"] for p in container["ports"]}
                self.assertEqual({e["port"] for e in monitor["podMetricsEndpoints"]} - ports, set())
            rules = overlay.documents["PrometheusRule", "crumb"]["spec"]["groups"]
            self.assertEqual(rules, make_prometheusrule.document(
                ROOT / "deploy/prometheus/rules")["spec"]["groups"])
            # The alert CrumbDown selects by this name.
            self.assertIn({"targetLabel": "job", "replacement": "crumbd"},
                          monitor["podMetricsEndpoints"][0]["relabelings"])

    def reachable_from(self, overlay, template, port):
        """The selectors of `from` of the pods that may reach a port of a pod; None if all may."""
        labels = template["metadata"]["labels"]
        selecting = [p["spec"] for p in overlay.policies
                     if p["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
                     and "Ingress" in p["spec"]["policyTypes"]]
        if not selecting:
            return None
        sources = []
        for rule in (rule for spec in selecting for rule in spec.get("ingress", [])):
            if "ports" in rule and port not in [p["port"] for p in rule["ports"]]:
                continue
            if "from" not in rule:
                return None
            sources += rule["from"]
        return sources

    def test_the_ports_between_crumbds_are_closed_to_everybody_else(self):
        crumbds = [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "crumbd"}}}]
        monitoring = [{"namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
        for name, expected in (("daemonset", []), ("sidecar", []), ("vllm", []),
                               ("cluster", crumbds)):
            overlay = Overlay(name)
            for template, _ in overlay.crumbd_pods():
                with self.subTest(overlay=name):
                    self.assertEqual(self.reachable_from(overlay, template, 9461), expected)
                    self.assertEqual(self.reachable_from(overlay, template, 9462), expected)
                    self.assertEqual(self.reachable_from(overlay, template, 9464), monitoring)

    def test_etcd_is_open_to_crumbds_only(self):
        overlay = Overlay("cluster")
        template = overlay.pods["StatefulSet", "etcd"]
        names = {s["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
                 for s in self.reachable_from(overlay, template, 2379)}
        self.assertEqual(names, {"crumbd", "etcd"})
        self.assertEqual(len(self.reachable_from(overlay, template, 2380)), 1)

    def etcd_command(self, port, folder):
        """The manifest's command for one member on this machine; `port` maps its ports."""
        container = Overlay("cluster").pods["StatefulSet", "etcd"]["spec"]["containers"][0]
        mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        words = []
        for word in container["command"]:
            word = re.sub(r"(--initial-cluster=[^,]*).*", r"\1", word)
            word = re.sub(r"0\.0\.0\.0|(\$\(POD_NAME\)|etcd-0)\.etcd", "127.0.0.1", word)
            word = word.replace("$(POD_NAME)", "etcd-0")
            for number, ours in port.items():
                word = word.replace(f":{number}", f":{ours}")
            word = word.replace(mounts["tls"] + "/", f"{folder}/")
            words.append(word.replace(mounts["data"] + "/", f"{folder}/etcd/"))
        return words, container

    def crumbd_configuration(self, etcd, folder):
        """The overlay's configuration for this machine."""
        settings = yaml.safe_load(Overlay("cluster").configuration(folder).read_text())
        settings["listen"] = {"socket_dir": str(folder), "tcp": "127.0.0.1:0"}
        settings["admin"]["listen"] = "127.0.0.1:0"
        settings["transport"]["listen"] = "127.0.0.1:0"
        settings["store"]["host"] = {"bytes_max": "16MiB", "slab_bytes": "4MiB"}
        settings["store"]["ssd"]["path"] = f"{folder}/ssd"
        cluster = settings["cluster"]
        cluster |= {"etcd": [etcd], "secret_file": f"{folder}/secret"}
        access = cluster["etcd_access"]
        mounts = {m["mountPath"] for m in next(Overlay("cluster").crumbd_pods())[1]["volumeMounts"]}
        for name in ("ca_file", "cert_file", "key_file"):
            self.assertIn(access[name].rpartition("/")[0], mounts)
            access[name] = f"{folder}/{access[name].rpartition('/')[2]}"
        return settings

    def test_etcd_responds_to_crumbds_over_tls_alone(self):
        folder = pathlib.Path(self.temporary.name)
        make_certificates(folder, "etcd-0.etcd")
        for made, name in (("ca.pem", "ca.crt"), ("node.pem", "tls.crt"), ("node.key", "tls.key")):
            (folder / made).rename(folder / name)
        (folder / "secret").write_text("a secret of a test")
        port = dict(zip((2379, 2380, 2381), free_ports(3)))
        words, container = self.etcd_command(port, folder)
        self.assertNotIn("http://127.0.0.1:%d" % port[2379], " ".join(words))
        etcd = Process(words, folder / "etcd.log")
        self.addCleanup(etcd.stop)
        for probe in ("readinessProbe", "livenessProbe"):
            request = container[probe]["httpGet"]
            number = {p["name"]: p["containerPort"] for p in container["ports"]}[request["port"]]
            place = f"http://127.0.0.1:{port[number]}{request['path']}"

            def healthy():
                self.assertTrue(etcd.alive(), etcd.tail())
                try:
                    return '"health":"true"' in http(place)
                except OSError:
                    return False

            wait_for(f"etcd's {probe}", healthy)
        node = Crumbd(BIN, folder)
        settings = self.crumbd_configuration(f"127.0.0.1:{port[2379]}", folder)
        (folder / "crumbd.yaml").write_text(yaml.safe_dump(settings))
        self.addCleanup(node.stop)
        node.start()
        wait_for("crumbd is in etcd", lambda: 'crumb_etcd_state{state="ok"} 1' in
                 node.get("/metrics"))

        def nodes_in_etcd(scheme, certificate):
            context = ssl.create_default_context(cafile=folder / "ca.crt")
            if certificate:
                context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
            names = [base64.b64encode(b"/crumb/nodes" + end).decode() for end in (b"/", b"0")]
            query = json.dumps({"key": names[0], "range_end": names[1], "count_only": True})
            with urllib.request.urlopen(
                    f"{scheme}://127.0.0.1:{port[2379]}/v3/kv/range", data=query.encode(),
                    timeout=60, context=context if scheme == "https" else None) as response:
                return int(json.load(response)["count"])

        self.assertEqual(nodes_in_etcd("https", certificate=True), 1)
        for scheme in ("https", "http"):
            with self.assertRaises(OSError):  # the handshake, or a response that is none
                nodes_in_etcd(scheme, certificate=False)

    def test_workers_share_the_socket_folder(self):
        example = yaml.safe_load((K8S / "overlays/daemonset/worker-example.yaml").read_text())
        daemon = next(Overlay("daemonset").crumbd_pods())[0]["spec"]
        path = {v["hostPath"]["path"] for v in daemon["volumes"] if v["name"] == "sockets"}
        self.assertEqual({v["hostPath"]["path"] for v in example["spec"]["volumes"]}, path)
        group = daemon["containers"][0]["securityContext"]["runAsGroup"]
        self.assertIn(group, example["spec"]["securityContext"]["supplementalGroups"])
        sidecar = next(Overlay("sidecar").crumbd_pods())[0]["spec"]
        self.assertIn({"name": "sockets", "mountPath": SOCKET_DIR},
                      sidecar["containers"][0]["volumeMounts"])
        self.assertEqual(sidecar["securityContext"]["fsGroup"], group)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, default=BIN)
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
