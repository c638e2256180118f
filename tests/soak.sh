#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Two nodes and the workers of three tenants under load for hours, with processes that are killed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  cat <<'HELP'
usage: tests/soak.sh [--hours H] [--mib-per-second M] [--host-mib M] [--ssd-mib M] [--folder F] [--seed N]

Starts two crumbds on loopback, in one cluster over TLS, and a worker of each of three tenants on each of
them. The rates of disk and loopback are measured first; the workers together publish at 80 % of the smaller
one, or --mib-per-second if that is less, and read pages of their tenant from both nodes. Every byte of every
hit is compared with what follows from the page's number.

Each minute a random process, a worker or the crumbd of node 1, is killed with SIGKILL and started again; the
crumbd of node 0 lives on, so that what it leaks adds up. Each hour one crumbd is taken over and one tenant's keyspace is dropped. Runs of less than two hours have shorter minutes and hours,
so that each of these happens.

Prints a line a minute and a table at the end. Fails (exit code 1) when
  - a byte is wrong, or a page is served after its drop was acknowledged;
  - a process ends by itself, or does not serve within a minute;
  - memory, descriptors, leases, leased slots, reservations or staging memory of a node grow: the line through
    the samples behind the first fifth of the run, of node 0 within the life of each process, rises by more
    than 10 % of the mean, or a small floor; or there are too few samples to say so;
  - anything is held for workers when there are none.
Needs openssl and python3; builds with the preset release unless CRUMB_BUILD names a build folder.
HELP
  exit 0
fi

build="${CRUMB_BUILD:-build/release}"
if [[ -z "${CRUMB_BUILD:-}" ]]; then
  cmake --preset release >/dev/null
  cmake --build --preset release --target crumbd crumb-soak-worker
fi
exec python3 tests/soak/soak.py --crumbd "$build/bin/crumbd" --worker "$build/tests/crumb-soak-worker" "$@"
