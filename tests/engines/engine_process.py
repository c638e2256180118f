# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own, which tests and benchmarks talk to."""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SKIPPED = 77
PUBLISHED_SECONDS = 60  # bound on the time until a request's pages are hits


def package_environment(build, folder):
    """Returns the environment in which Python of any virtual environment imports the package from a
    build, by links in `folder`. python/tests/wheel_test.py tests the wheel."""
    package = folder / "package"
    subprocess.run([sys.executable, ROOT / "python/tools/develop.py", "--build", build, "--to",
                    package], check=True, timeout=60)
    return {**os.environ, "PYTHONPATH": str(package)}


def run_tests(engine, folder, installer, options, description):
    """Runs the tests of the main module with `options.build` from the command line, and ends the
    process: with exit code 77 if the engine is not installed in build/`folder`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--build", type=lambda text: pathlib.Path(text).resolve(),
                        default=ROOT / "build/release")
    _, rest = parser.parse_known_args(namespace=options)
    if not (ROOT / "build" / folder / "pinned").exists():
        print(f"skipped: {engine} is not installed; tests/engines/{installer} installs it")
        sys.exit(SKIPPED)
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)


PROBE = """
import importlib.util
missing = [name for name in ("torch", "vllm") if importlib.util.find_spec(name) is None]
if not missing:
    import torch
    missing = [] if torch.cuda.is_available() else ["a CUDA device"]
print(", ".join(missing))
"""


def require_gpu(python):
    """Ends the process with exit code 77 if an interpreter has no vLLM or no CUDA device. Any other
    failure of the probe, a broken installation for example, is an error."""
    missing = output_of(python, PROBE).strip()
    if missing:
        print(f"skipped: {python} needs {missing}")
        sys.exit(SKIPPED)


def output_of(python, program, *arguments, text=""):
    """The standard output of a Python program. Ends the process with an error if it fails."""
    done = subprocess.run([python, "-c", program, *arguments], input=text, capture_output=True,
                          text=True, timeout=300, check=False)
    if done.returncode != 0:
        sys.exit(f"{python} failed:\n{done.stderr}")
    return done.stdout


FLUSH = """
import sys
import crumb
with crumb.Client(sys.argv[1]) as client:
    client.wait_connected(20)
    print(client.flush(60))
"""


def flush(environment, folder):
    """Waits until the pages of the crumbd in `folder` are durable; returns how many were written.
    environment: of `package_environment`."""
    done = subprocess.run([sys.executable, "-c", FLUSH, folder], env=environment,
                          capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


class EngineProcess:
    """A process that writes a line "RESULT {...}" for each line of JSON on its standard input, as
    vllm_engine.py and sglang_engine.py do. It is started at once."""

    def __init__(self, command, environment=None):
        self.log = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([str(part) for part in command], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=self.log, env=environment)

    def read(self):
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                return json.loads(line[len("RESULT "):])
        raise AssertionError(f"the engine ended:\n{self.tail()}")

    def tail(self):
        self.log.seek(0)
        return self.log.read()[-6000:]

    def request(self, **fields):
        self.process.stdin.write(json.dumps(fields) + "\n")
        self.process.stdin.flush()
        return self.read()

    def generate(self, tokens, max_tokens=24, salt=None, **more):
        return self.request(tokens=tokens, max_tokens=max_tokens, salt=salt, **more)

    def hit(self, tokens, cached, **options):
        """Generates until `cached` tokens are hits: pages are published in the background. The
        engine's own prefix cache is emptied before each try, so that hits come from crumbd."""
        deadline = time.monotonic() + PUBLISHED_SECONDS
        while True:
            reset = self.request(reset=True)
            assert reset == {"reset": True}, reset
            result = self.generate(tokens, **options)
            if result["cached"] >= cached or time.monotonic() > deadline:
                return result

    def close(self):
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(120)
        self.process.stdout.close()
        self.log.close()


class Engine(EngineProcess):
    """vllm_engine.py: its messages are described there.

    config: kv_connector_extra_config, None for an engine without connector. options: of vLLM's LLM.
    The engine is ready after `ready`.
    """

    def __init__(self, python, model, config=None, options=None, environment=None, ready=True):
        super().__init__([python, HERE / "vllm_engine.py", model, json.dumps(config),
                          json.dumps(options or {})], environment)
        if ready:
            self.ready()

    def ready(self):
        """Waits until the engine has started; returns its first result, which describes it."""
        return self.read()
