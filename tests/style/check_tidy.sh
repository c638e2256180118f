#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Runs clang-tidy on C++ sources with the checks of .clang-tidy and clang's analysis of lock
# annotations, and fails if either reports something. Tests are not checked: most checks concern speed.
#   tests/style/check_tidy.sh [--build DIR] [--seconds N] [--all | --base COMMIT | FILE...]
# --all checks every source, --base COMMIT those that differ from COMMIT. Without either, and without
# files, the script checks the sources of the latest commits, those that changed last first:
#   1. commits since the merge base with origin/HEAD, if HEAD is ahead of it (a branch),
#   2. otherwise commits since the newest tag,
#   3. otherwise the last 100 commits, all that a clone without branches and tags can know.
# No rule says which commits have passed before, so the list may be long. --seconds bounds the time
# (0, the default, sets no bound): after it no further source is started, and the script reports how
# many were left. A header stands for the source of the same name. One source takes 5 to 30 s of a core.
# clang-tidy reads compile_commands.json of a build folder, build/tidy by default, which this script
# configures and in which it generates the headers of messages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build=build/tidy base='' all=0 seconds=0 files=() range='the given files'
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --base) base=${2:?--base needs a commit}; shift 2 ;;
    --seconds) seconds=${2:?--seconds needs a number}; shift 2 ;;
    --all) all=1; shift ;;
    -h|--help) sed -n '4,17s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "check_tidy.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
    *) files+=("$1"); shift ;;
  esac
done
[[ "$seconds" =~ ^[0-9]+$ ]] || { echo "check_tidy.sh: --seconds $seconds is no number of seconds" >&2; exit 2; }
if [[ "$build" == build/tidy ]]; then
  cmake --preset tidy >/dev/null
  ninja -C "$build" -t targets all | sed -n 's/^\(.*\(\.pb\|\/commit\)\.h\): .*/\1/p' | xargs ninja -C "$build" >/dev/null
elif [[ ! -f "$build/compile_commands.json" ]]; then
  echo "check_tidy.sh: $build has no compile_commands.json; configure it with cmake first" >&2
  exit 2
fi

# Prints the arguments of git log that select the commits to check when the caller names none.
latest_commits() {
  local merged tag
  merged=$(git merge-base HEAD origin/HEAD 2>/dev/null) || merged=''
  if [[ -n "$merged" && "$merged" != "$(git rev-parse HEAD)" ]]; then
    echo "$merged..HEAD"
  elif tag=$(git describe --tags --abbrev=0 HEAD~1 2>/dev/null); then
    echo "$tag..HEAD"
  else
    echo "-100 HEAD"
  fi
}

if [[ $all -eq 1 ]]; then
  range='the repository'
  mapfile -t files < <(git ls-files '*.cc' ':!tests/')
elif [[ -n "$base" ]]; then
  if ! git rev-parse --verify --quiet "$base^{commit}" >/dev/null; then
    echo "check_tidy.sh: there is no commit $base" >&2
    exit 2
  fi
  range="the changes since $base"
  mapfile -t files < <(git diff --name-only --diff-filter=d "$base" -- '*.cc' '*.h' ':!tests/')
elif [[ ${#files[@]} -eq 0 ]]; then
  read -ra commits < <(latest_commits)
  range="git log ${commits[*]}"
  mapfile -t files < <(git log --format= --name-only "${commits[@]}" -- '*.cc' '*.h' ':!tests/')
fi

# Sources that the build folder compiles, each once, in the order given. Others, such as those for
# CUDA, have no command.
mapfile -t sources < <(printf '%s\n' "${files[@]/%.h/.cc}" | python3 -c '
import json, pathlib, sys
commands = json.load(open(sys.argv[1], encoding="utf-8"))
compiled = {pathlib.Path(entry["directory"], entry["file"]).resolve() for entry in commands}
for line in dict.fromkeys(line.strip() for line in sys.stdin):
    path = pathlib.Path(line)
    if line and path.is_file() and path.resolve() in compiled:
        print(line)' "$build/compile_commands.json")

left=$(mktemp)
trap 'rm -f "$left"' EXIT
end=$((seconds > 0 ? $(date +%s) + seconds : 0))
if [[ ${#sources[@]} -gt 0 ]]; then
  # clang's own warnings are off except those about locks.
  printf '%s\0' "${sources[@]}" | END=$end LEFT=$left BUILD=$build xargs -0 -n 1 -P "$(nproc)" bash -c '
    if [[ $END -gt 0 && $(date +%s) -ge $END ]]; then echo "$1" >>"$LEFT"; exit 0; fi
    exec clang-tidy-14 --quiet -p "$BUILD" --extra-arg=-Wno-everything --extra-arg=-Wthread-safety "$1"' tidy \
    2> >(grep -v 'warnings\? generated' >&2)
fi
skipped=$(wc -l <"$left")
echo "tidy: $((${#sources[@]} - skipped)) of ${#sources[@]} sources in $range"
[[ $skipped -eq 0 ]] || echo "tidy: $skipped sources were not reached within $seconds s; check_tidy.sh --all checks them"
