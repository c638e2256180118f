#!/usr/bin/env python3
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Histories break no rule because the machine gives them no processor time.

Stops the processes of crumb-histories for longer than a history may run, continues them, and expects them
to go on until SIGTERM ends the program.
"""
import os
import signal
import subprocess
import sys
import time

STOPPED_SECONDS = 62  # more than kCpuSecondsMax of runner.cc
RUNNING_SECONDS = 2
EXIT_STOPPED = 3  # kExitStopped of histories_main.cc


def main():
    with subprocess.Popen([sys.argv[1], "--histories", "10000000", "--jobs", "2", "--shrink-runs", "0"],
                          stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        group = os.getpgid(program.pid)
        time.sleep(RUNNING_SECONDS)
        os.killpg(group, signal.SIGSTOP)
        time.sleep(STOPPED_SECONDS)
        os.killpg(group, signal.SIGCONT)
        time.sleep(RUNNING_SECONDS)
        os.killpg(group, signal.SIGTERM)
        printed = program.communicate()[0]
    if program.returncode != EXIT_STOPPED:
        sys.exit(f"crumb-histories ended with exit code {program.returncode}, not {EXIT_STOPPED}:\n{printed}")


main()
