#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Runs built programs on a machine's GPUs; tests/gpu.sh builds them and calls this.

checks      every *_cuda_*_test in parts (GoogleTest's shards), over all cores and GPUs at once
timings     the benches one after the other with nothing beside them, on the first GPU
sanitizers  compute-sanitizer's tools over some of the tests, over all cores and GPUs again

A part or a bench that is not done in its time, or in that of its section, has failed.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Seconds of a section on a host that runs so many programs at once, with fewer of them more; jobs
# that have not begun by then do not run.
SECTION_SECONDS = {"checks": 150, "timings": 280, "sanitizers": 150}
SECTION_SLOTS = 32
CHECK_SECONDS = 200
SANITIZER_SECONDS = 150
# The longest tests come first, in many parts: not one for each test, as a process that begins
# beside others takes seconds until it has its GPU.
LONG_TESTS = {"kernels_cuda_decode_test": 40, "kernels_cuda_prefill_test": 16,
              "kernels_cuda_hazards_test": 16, "kernels_cuda_evict_test": 16,
              "kernels_cuda_bf16_history_test": 6}
SHORT_PARTS = 3
TWO_GPU_TESTS = ("client_cuda_pools_test",)

# (file, program, seconds, arguments, GPUs)
TIMINGS = (
    ("kernels", "crumb-kernel-bench", 120, [], 1),
    ("decode", "crumb-decode-bench", 200, ["--shape", "qwen3-4b,qwen3-8b,glm-4.7"], 1),
    ("device", "crumb-device-bench", 150, ["--batch", "1,8,32"], 1),
    ("device_hit", "crumb-device-hit-bench", 60, [], 1),
    ("device_hit_cold", "crumb-device-hit-bench", 60, ["--cold"], 1),
    ("device_peer_hit", "crumb-device-hit-bench", 90, ["--peer", "1"], 2),
)

SANITIZED = ("decode", "evict", "serving", "append", "paged_kv", "prefill", "fetch",
             "bf16_history", "query_offsets")
SANITIZED_TESTS = ("LengthsAround", "PaddedEntries", "SameBytes",
                   "GrowOverEvery", "WritesTheNew", "LooksAt", "ReportsThePage",
                   "WindowsAreCopied", "DecodeOfDrafts", "AgreeWithSums")
# Filters of the tests that racecheck runs where all of a program's take it minutes.
RACECHECKED_TESTS = {"evict": "*FewerWindows*"}
# racecheck of 2025.3.1 names hazards across a __syncthreads in blocks of clusters; 2026.4 does not
# (docs/kernels/cuda.md). kAuto takes clusters, too.
RACECHECK_OF_CLUSTERS = (2026, 4)
CLUSTERS = {"decode": "*/clusters:*/auto", "bf16_history": "*DecodeOf*"}


@dataclasses.dataclass
class Job:
    name: str  # the name of its log
    row: str  # the table's row; a row may have several jobs
    command: list
    seconds: int
    environment: dict = dataclasses.field(default_factory=dict)
    gpus: int = 1  # number that it sees
    gpu: int = 0  # the first of them
    output: pathlib.Path = None  # file for standard output, which else is in the log, too
    log: pathlib.Path = None
    code: int = None
    took: float = 0.0

    def text(self):
        return self.log.read_text(encoding="utf-8", errors="replace")


class Machine:
    """Its GPUs, and the processes that run on them."""

    def __init__(self, options):
        self.gpus = options.gpus.split(",")
        self.capability = options.capability
        self.output = options.output
        self.programs = options.programs
        cores = len(os.sched_getaffinity(0))
        self.slots = max(1, min(cores, options.per_gpu * len(self.gpus)))
        self.lock = threading.Lock()
        self.load = [0] * len(self.gpus)  # jobs that run on each
        self.begun = [0] * len(self.gpus)
        self.running = set()
        self.stopped = False

    def environment(self, job):
        order = (self.gpus[job.gpu:] + self.gpus[:job.gpu])[:job.gpus]
        libraries = [str(self.programs / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(order),
                "LD_LIBRARY_PATH": ":".join(x for x in libraries if x), **job.environment}

    def run(self, job, deadline, first=False):
        """On the GPU with the fewest jobs, or on the first one."""
        with self.lock:
            loads = list(zip(self.load, self.begun))
            job.gpu = 0 if first else loads.index(min(loads))
            self.load[job.gpu] += 1
            self.begun[job.gpu] += 1
        start = time.monotonic()
        seconds = min(job.seconds, deadline - start)
        job.log = self.output / f"{job.name}.log"
        with open(job.log, "wb") as log:
            if seconds <= 0 or self.stopped:
                log.write(b"not started: the section's time was up\n")
                job.code = 124
            else:
                job.code = self.wait(job, log, seconds)
        job.took = time.monotonic() - start
        with self.lock:
            self.load[job.gpu] -= 1
        return job

    def wait(self, job, log, seconds):
        with open(job.output or os.devnull, "wb") as out:
            try:
                process = subprocess.Popen(  # pylint: disable=consider-using-with
                    job.command, stdin=subprocess.DEVNULL, stdout=out if job.output else log,
                    stderr=log, cwd=ROOT, env=self.environment(job), start_new_session=True)
            except OSError as error:
                log.write(f"Error: cannot run: {error}\n".encode())
                return 127
            with self.lock:
                self.running.add(process)
                late = self.stopped
            try:
                return 143 if late else process.wait(seconds)
            except subprocess.TimeoutExpired:
                log.write(f"\nnot done after {seconds:.0f} s\n".encode())
                return 124
            finally:
                end_group(process)
                with self.lock:
                    self.running.discard(process)

    def run_all(self, jobs, section):
        """Yields jobs as they are done."""
        seconds = SECTION_SECONDS[section] * max(1.0, SECTION_SLOTS / self.slots)
        deadline = time.monotonic() + seconds
        with concurrent.futures.ThreadPoolExecutor(self.slots) as pool:
            try:
                for done in concurrent.futures.as_completed(
                        [pool.submit(self.run, job, deadline) for job in jobs]):
                    yield done.result()
            except BaseException:  # the pool waits for all that was submitted
                self.stop()
                raise

    def stop(self):
        with self.lock:
            self.stopped = True
            running = list(self.running)
        for process in running:
            end_group(process)


def end_group(process):
    """The process and whatever it has started and left."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()


class Report:
    def __init__(self):
        self.failed = []

    def fail(self, name, why=""):
        self.failed.append(name + (f" ({why})" if why else ""))

    def row(self, name, took, what):
        print(f"  {name:<34} {took:6.1f} s  {what}", flush=True)

    def excerpt(self, job, lines):
        for line in lines[:40]:
            print(f"    {line}")
        print(f"    log: {job.log}", flush=True)


def listed_tests(machine, program, chosen="*"):
    """How many tests a program has."""
    try:
        listed = subprocess.run([program, "--gtest_list_tests", f"--gtest_filter={chosen}"],
                                capture_output=True, text=True, timeout=60, check=False,
                                env=machine.environment(Job("", "", [], 0)))
    except OSError:
        return 0  # running it says why
    return sum(line.startswith("  ") for line in listed.stdout.splitlines())


def ran_tests(text):
    return sum(int(n) for n in re.findall(r"^\[=+\] (\d+) tests? from .* ran\.", text, re.M))


def skips_of(text):
    return re.findall(r": Skipped\n(.*)", text)


def may_lack(machine, reason):
    """Whether a test may be skipped here."""
    if reason.startswith("needs two CUDA devices"):
        return len(machine.gpus) < 2
    needs = re.match(r"needs compute capability ([0-9.]+)", reason)
    return bool(needs) and machine.capability < float(needs.group(1))


def test_jobs(name, command, tests, parts, seconds, gpus=1):
    """The parts of a program with GoogleTest's tests."""
    parts = max(1, min(tests, parts))
    for part in range(parts):
        shard = {"GTEST_TOTAL_SHARDS": str(parts), "GTEST_SHARD_INDEX": str(part)}
        yield Job(f"{name}.{part}" if parts > 1 else name, name, command, seconds, shard, gpus)


def run_rows(machine, report, jobs, section, judge):
    """Runs jobs; judge(row's jobs) returns the text and the failure of a row that is done."""
    missing = collections.Counter(job.row for job in jobs)
    done = collections.defaultdict(list)
    for job in machine.run_all(jobs, section):
        done[job.row].append(job)
        missing[job.row] -= 1
        if missing[job.row] > 0:
            continue
        of_row = done[job.row]
        what, why = judge(of_row)
        total, longest = sum(j.took for j in of_row), max(j.took for j in of_row)
        notes = [f"{len(of_row)} parts, longest {longest:.1f} s"] if len(of_row) > 1 else []
        notes += [what] if what else []
        report.row(job.row, total, "; ".join(notes + ([f"FAILED: {why}"] if why else [])))
        if why:
            report.fail(job.row, why)
            for bad in [j for j in of_row if j.code != 0][:3]:
                report.excerpt(bad, excerpt_of(bad.text()))


def excerpt_of(text):
    """Returns the lines of a log that report a failure, with a few lines behind each."""
    lines, shown, left = text.splitlines(), [], 0
    for line in lines:
        if re.search(r"Failure|FAILED|Error|ERROR SUMMARY|not done|not started", line):
            left = 6 if "Failure" in line else 1
        if left > 0:
            shown.append(line)
            left -= 1
    return shown


def judge_tests(machine, tests, jobs):
    texts = [job.text() for job in jobs]
    ran = sum(ran_tests(text) for text in texts)
    skips = collections.Counter(skip for text in texts for skip in skips_of(text))
    skipped = "".join(f"; {count} skipped: {reason}" for reason, count in skips.items())
    why = []
    codes = sorted({job.code for job in jobs} - {0})
    if codes:
        why.append("exit code " + ", ".join(map(str, codes)))
    if ran != tests or ran == 0:
        why.append(f"{tests} tests were to run")
    if not all(may_lack(machine, reason) for reason in skips):
        why.append("skipped")
    return f"{ran} tests{skipped}", ", ".join(why)


def judge_program(jobs):
    codes = [job.code for job in jobs if job.code != 0]
    if codes:
        return "", f"exit code {codes[0]}"
    return "", "skipped" if any("skipped=" in job.text() for job in jobs) else ""


def checks(machine, report, options):
    del options
    programs = sorted((machine.programs / "tests").glob("*_cuda_*_test"),
                      key=lambda p: (*[p.name != x for x in LONG_TESTS], p.name))
    with concurrent.futures.ThreadPoolExecutor(machine.slots) as pool:
        tests = dict(zip([p.name for p in programs],
                         pool.map(lambda p: listed_tests(machine, p), programs)))
    # The demonstration takes long and is one piece.
    jobs = [Job("demo", "demo", ["python3", "deploy/demo.py", "--bin",
                                 str(machine.programs / "bin"), "--device", "cuda"], 200),
            Job("client_c_api_test", "client_c_api_test",
                ["python3", "tests/client/c_api/c_api_test.py", "--build", str(machine.programs),
                 "CApiTest.test_device_program"], 200)]
    for program in programs:
        jobs += test_jobs(program.name, [str(program)], tests[program.name],
                          LONG_TESTS.get(program.name, SHORT_PARTS), CHECK_SECONDS,
                          2 if program.name in TWO_GPU_TESTS else 1)

    def judge(of_row):
        if of_row[0].row not in tests:
            return judge_program(of_row)
        return judge_tests(machine, tests[of_row[0].row], of_row)
    run_rows(machine, report, jobs, "checks", judge)


def timings(machine, report, options):
    end = time.monotonic() + SECTION_SECONDS["timings"]
    for name, program, seconds, arguments, gpus in TIMINGS:
        if gpus > len(machine.gpus):
            report.row(name, 0, f"left out: needs {gpus} GPUs")
            continue
        file = machine.output / f"{name}.{'json' if options.commit else 'txt'}"
        json_arguments = ["--json", "--commit", options.commit] if options.commit else []
        job = Job(name, name, [str(machine.programs / "bin" / program), *arguments,
                               *json_arguments], seconds, gpus=gpus, output=file)
        machine.run(job, end, first=True)
        why = f"exit code {job.code}" if job.code else ""
        if options.commit and not why:
            try:
                json.loads(file.read_text(encoding="utf-8"))
            except ValueError as error:
                why = f"its JSON is none: {error}"
        report.row(name, job.took, str(file) + (f"; FAILED: {why}" if why else ""))
        if not options.commit:
            print(file.read_text(encoding="utf-8", errors="replace"), flush=True)
        if why:
            report.fail(name, why)
            report.excerpt(job, job.text().splitlines()[-20:])


def find_sanitizer():
    folders = os.environ.get("PATH", "")
    folders += f":{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"
    return shutil.which("compute-sanitizer", path=folders)


def output_by(*command):
    return subprocess.run(command, capture_output=True, text=True, timeout=60,
                          check=False).stdout


def sanitizer_jobs(machine, sanitizer, tests):
    version = re.search(r"Version (\d+)\.(\d+)", output_by(sanitizer, "--version"))
    clusters = bool(version) and tuple(map(int, version.groups())) >= RACECHECK_OF_CLUSTERS
    if not clusters:
        print("  decode, bf16_history: clusters left out of racecheck, which needs "
              "compute-sanitizer 2026.4 for them")
    # It waits for its program on a port, one of ten.
    many = "--max-connections" in output_by(sanitizer, "--help")
    for tool in ("racecheck", "memcheck", "synccheck", "initcheck"):
        for test in SANITIZED:
            program = str(machine.programs / f"tests/kernels_cuda_{test}_test")
            chosen = ":".join(f"*{name}*" for name in SANITIZED_TESTS)
            if tool == "racecheck":
                chosen = RACECHECKED_TESTS.get(test, chosen)
            if tool == "racecheck" and not clusters and test in CLUSTERS:
                chosen += f"-{CLUSTERS[test]}"
            command = [sanitizer, "--tool", tool, "--error-exitcode", "9",
                       *(["--max-connections", "200"] if many else []), program,
                       f"--gtest_filter={chosen}"]
            name = f"{tool}.{test}"
            tests[name] = listed_tests(machine, program, chosen)
            yield from test_jobs(name, command, tests[name], tests[name], SANITIZER_SECONDS)


def sanitizers(machine, report, options):
    del options
    sanitizer = find_sanitizer()
    if not sanitizer:
        print("  compute-sanitizer: not installed, left out")
        return
    tests = {}

    def judge(of_row):
        what, why = judge_tests(machine, tests[of_row[0].row], of_row)
        summaries = collections.Counter(line for job in of_row for line in
                                   re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY.*|Error: .*)$",
                                              job.text(), re.M))
        return "; ".join([what, *summaries]), why
    run_rows(machine, report, list(sanitizer_jobs(machine, sanitizer, tests)), "sanitizers",
             judge)


SECTIONS = {"checks": checks, "timings": timings, "sanitizers": sanitizers}


def parse(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=pathlib.Path, required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--commit")
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--gpus", required=True, help="ordinals, as CUDA_VISIBLE_DEVICES has them")
    parser.add_argument("--capability", type=float, required=True, help="compute capability")
    parser.add_argument("--per-gpu", type=int, default=16, help="processes at once on a GPU")
    options = parser.parse_args(arguments)
    options.only = options.only.split(",")
    for name in options.only:
        if name not in SECTIONS:
            parser.error(f"--only takes {', '.join(SECTIONS)}, not '{name}'")
    options.programs, options.output = options.programs.resolve(), options.output.resolve()
    return options


def main():
    options = parse(sys.argv[1:])
    options.output.mkdir(parents=True, exist_ok=True)
    machine, report = Machine(options), Report()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    try:
        for name in [x for x in SECTIONS if x in options.only]:
            print(f"{name}: {len(machine.gpus)} GPUs, "
                  f"{1 if name == 'timings' else machine.slots} at once", flush=True)
            began = time.monotonic()
            SECTIONS[name](machine, report, options)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        machine.stop()
    print(f"{time.monotonic() - start:.0f} s in all; logs: {options.output}")
    for name in report.failed:
        print(f"failed: {name}")
    if not report.failed:
        print("everything passed")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
