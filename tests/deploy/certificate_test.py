#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Tests the metrics and logs of a crumbd whose certificates expire soon and are then replaced."""

import argparse
import datetime
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from services import ROOT, Crumbd, make_certificates, wait_for

BIN = ROOT / "build/release/bin"
WAIT_SECONDS = 60


def end_of(certificate):
    """The Unix time at which the certificate expires, by openssl."""
    text = subprocess.run(["openssl", "x509", "-in", certificate, "-noout", "-enddate"], check=True,
                          capture_output=True, text=True, timeout=60).stdout
    end = datetime.datetime.strptime(text.strip(), "notAfter=%b %d %H:%M:%S %Y GMT")
    return end.replace(tzinfo=datetime.timezone.utc).timestamp()


class CertificateTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="crumb-certificates-")
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        self.crumbd = Crumbd(
            BIN, self.folder, host_bytes="16MiB", tcp="127.0.0.1:0",
            listen=f"  tls:\n    cert_file: {self.folder}/node.pem\n"
                   f"    key_file: {self.folder}/node.key\n"
                   f"    client_ca_file: {self.folder}/ca.pem\n    reload_interval: 1s\n")
        self.addCleanup(self.crumbd.stop)

    def exported(self, setting):
        name = re.escape(f'crumb_certificate_expiry_timestamp_seconds{{setting="{setting}"}}')
        return float(re.search(rf"^{name} (\S+)$", self.crumbd.get("/metrics"), re.MULTILINE)[1])

    def replace(self, days):
        """Replaces the node's certificate, key and authority by new files."""
        fresh = self.folder / "fresh"
        fresh.mkdir(exist_ok=True)
        make_certificates(fresh, "crumbd.test", days=days)
        for name in ("node.key", "node.pem", "ca.pem"):
            (fresh / name).rename(self.folder / name)

    def follows(self):
        """Waits until the exported metrics agree with the files."""
        for setting, name in (("cert_file", "node.pem"), ("client_ca_file", "ca.pem")):
            wait_for(setting, lambda s=setting, n=name: self.exported(f"listen.tls.{s}")
                     == end_of(self.folder / n), seconds=WAIT_SECONDS)

    def test_ends_are_exported_and_warned_of(self):
        make_certificates(self.folder, "crumbd.test", days=1)
        self.crumbd.start()
        self.follows()
        for name in ("cert_file", "client_ca_file"):
            self.assertRegex(self.crumbd.process.tail(), rf"listen\.tls\.{name}: .* expires on ")
        self.replace(days=365)
        self.follows()
        self.replace(days=366)
        self.follows()
        self.assertEqual(self.crumbd.process.tail().count("expires on"), 2)  # those at the start

    def test_an_expired_certificate_in_its_place_is_an_error(self):
        make_certificates(self.folder, "crumbd.test", days=365)
        self.crumbd.start()
        self.follows()
        self.assertNotIn("expire", self.crumbd.process.tail())
        self.replace(days=-1)
        self.follows()
        wait_for("an error", lambda: re.search(r"cert_file: .* expired on ",
                                               self.crumbd.process.tail()), seconds=WAIT_SECONDS)
        self.assertIn('crumb_log_messages_total{severity="error"} 1\n', self.crumbd.get("/metrics"))
        self.assertEqual(self.crumbd.stop(), 0)
        done = subprocess.run([BIN / "crumbd", "--config", self.folder / "crumbd.yaml"],
                              capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("expired on", done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", type=pathlib.Path, default=BIN)
    arguments, rest = parser.parse_known_args()
    BIN = arguments.bin.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
