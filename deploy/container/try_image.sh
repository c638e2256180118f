#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Builds the image without a registry, from a base of Debian packages, runs it like Kubernetes, calls it
# and stops it. Needs root, Debian's debootstrap, buildah, podman and
# runc, and a Debian mirror. No test runs it: it compiles everything.
#   deploy/container/try_image.sh [--mirror URL] [--folder DIR] [--worker crumb-tiny-lm]
# --worker also runs a worker of the host, which publishes through the container's sockets and hits.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

mirror=http://deb.debian.org/debian
folder=/var/tmp/crumb-image
worker=
while [[ $# -gt 0 ]]; do
  case "$1" in
    --mirror) mirror=${2:?}; shift 2 ;;
    --folder) folder=${2:?}; shift 2 ;;
    --worker) worker=${2:?}; shift 2 ;;
    -h|--help) sed -n '4,8s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "try_image.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
  esac
done
base=localhost/debian:12
image=localhost/crumb:0.1.0
podman=(podman --runtime runc --cgroup-manager cgroupfs)

# The storage is separate, so that nothing else on the machine is changed.
mkdir -p "$folder"/{store,state,sockets,data}
printf '[storage]\ndriver = "overlay"\nrunroot = "%s"\ngraphroot = "%s"\n' \
  "$folder/state" "$folder/store" >"$folder/storage.conf"
export CONTAINERS_STORAGE_CONF=$folder/storage.conf

if ! podman image exists "$base"; then
  debootstrap --variant=minbase bookworm "$folder/base" "$mirror"
  tar -C "$folder/base" -c . | podman import - "$base"
  rm -rf "$folder/base"
fi
buildah bud --isolation chroot --build-arg DEBIAN="$base" -f deploy/container/Containerfile \
  -t "$image" .

chown 64200:64200 "$folder"/{sockets,data}
chmod 0750 "$folder"/{sockets,data}
limit=$(ulimit -n)  # podman requests more than a confined root may give
confined=(--ulimit "nofile=$limit:$limit" --ulimit nproc=4096:4096 --network none --read-only
  --read-only-tmpfs=false --cap-drop all --security-opt no-new-privileges)
trap '"${podman[@]}" rm -f crumbd >/dev/null 2>&1' EXIT
"${podman[@]}" run -d --name crumbd "${confined[@]}" --memory 2g \
  -v "$folder/sockets:/run/crumb" -v "$folder/data:/var/lib/crumb" "$image" >/dev/null
for _ in $(seq 300); do
  [[ -e "$folder/sockets/crumbd.endpoints.json" ]] && break
  sleep 0.1
done
"${podman[@]}" logs crumbd

echo "== crumb in the container"
"${podman[@]}" exec crumbd crumb status
"${podman[@]}" exec crumbd sh -c 'id && grep -E "^(CapEff|NoNewPrivs)" /proc/1/status && ! touch /x'
echo "== crumb in another container that shares the socket folder"
"${podman[@]}" run --rm "${confined[@]}" -v "$folder/sockets:/run/crumb" --entrypoint crumb "$image" stats
if [[ -n "$worker" ]]; then
  echo "== a worker of the host, twice"
  for _ in 1 2; do
    head -c 4000 docs/architecture.md |
      "$worker" --model models/data/tiny-lm --prompt-file - --store "$folder/sockets" --generate 1 --json
  done
fi

echo "== SIGTERM"
"${podman[@]}" stop -t 30 crumbd >/dev/null
"${podman[@]}" logs crumbd 2>&1 | tail -n 2
code=$("${podman[@]}" inspect crumbd --format '{{.State.ExitCode}}')
echo "exit code $code"
[[ "$code" == 0 && ! -e "$folder/sockets/crumbd.endpoints.json" ]]
