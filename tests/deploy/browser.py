# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium that is controlled over a pipe (the DevTools protocol)."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

RESPONSE_SECONDS = 60


class Browser:
    """One page of one browser, whose profile is in `folder`."""

    def __init__(self, folder):
        program = shutil.which("chromium")
        assert program, "chromium is not installed; see deploy/install_packages.sh --tests"
        commands, self.commands = os.pipe()
        self.replies, replies = os.pipe()
        # The browser reads commands from descriptor 3 and replies on descriptor 4.
        self.child = subprocess.Popen(
            ["sh", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{replies}', program, "--headless",
             "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             f"--user-data-dir={folder}", "--remote-debugging-pipe", "about:blank"],
            pass_fds=(commands, replies), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(commands)
        os.close(replies)
        self.buffer = b""
        self.events = []
        self.number = 0
        self.session = None
        pages = [t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page"]
        self.session = self.call("Target.attachToTarget", targetId=pages[0]["targetId"],
                                 flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Log.enable")
        self.call("Runtime.enable")
        self.call("Network.enable")

    def close(self):
        os.close(self.commands)
        self.child.terminate()
        self.child.wait()
        os.close(self.replies)

    def _message(self, deadline):
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.replies], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("chromium does not respond")
            piece = os.read(self.replies, 1 << 20)
            if not piece:
                raise ConnectionError("chromium ended")
            self.buffer += piece
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode("utf-8") + b"\0")
        deadline = time.monotonic() + RESPONSE_SECONDS
        while True:
            reply = self._message(deadline)
            if reply.get("id") == self.number:
                assert "error" not in reply, f"{method}: {reply.get('error')}"
                return reply["result"]
            self.events.append(reply)

    def open(self, url, width, height, dark):
        """Loads a page with a screen of this width."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self.events.clear()
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + RESPONSE_SECONDS
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._message(deadline))

    def value(self, expression):
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in reply, reply
        return reply["result"].get("value")

    def screenshot(self):
        """Returns a PNG of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(data["data"])
