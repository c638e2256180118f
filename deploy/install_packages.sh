#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that a build of Crumb needs; with --tests also those that its tests
# need, with --checks also those of .ci/run. Does nothing if all are installed.
set -euo pipefail

packages=(
  g++ cmake ninja-build pkg-config ccache git python3 python3-venv
  libgrpc++-dev libprotobuf-dev protobuf-compiler protobuf-compiler-grpc libabsl-dev
  librocksdb-dev prometheus-cpp-dev libspdlog-dev libfmt-dev libyaml-cpp-dev libcli11-dev
  libssl-dev libeigen3-dev libcpp-httplib-dev nlohmann-json3-dev libicu-dev libucx-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)
# Packages that only tests need.
tests=(etcd-server iproute2 openssl prometheus chromium python3-yaml python3-grpcio python3-protobuf systemd dpkg-dev file spin)
case "${1:-}" in
  "") ;;
  --tests) packages+=("${tests[@]}") ;;
  --checks) packages+=("${tests[@]}" clang-format-14 clang-tidy-14) ;;
  *) echo "install_packages.sh: unknown argument '$1'; --tests, --checks or none" >&2; exit 2 ;;
esac

missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [[ "$status" == "install ok installed" ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  echo "packages: all ${#packages[@]} are installed"
  exit 0
fi

root=()
if [[ $EUID -ne 0 ]]; then
  command -v sudo >/dev/null || {
    echo "packages: need root to install ${missing[*]}; run this as root or install sudo" >&2
    exit 1
  }
  root=(sudo)
fi
echo "packages: installing ${#missing[@]} with ${root[*]:-root}: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${root[@]}" apt-get update -qq
"${root[@]}" apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null

# Tests start these servers on their own ports. As services they would listen on public ones.
if [[ -d /run/systemd/system ]]; then
  for package in "${missing[@]}"; do
    case "$package" in
      prometheus) "${root[@]}" systemctl disable --quiet --now prometheus.service ;;
    esac
  done
fi
