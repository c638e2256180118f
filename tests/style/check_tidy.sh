#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Runs clang-tidy on C++ sources as .clang-tidy says, and fails when it finds something. Tests are
# left out: speed of a test is no matter of style.
#   tests/style/check_tidy.sh [--build DIR] [--all | --base COMMIT | FILE...]
# Without --all or files: those that differ from COMMIT; without --base those of the last commit,
# none in a clone that has no other. Instead of a header the source of the same name is checked.
# A file takes 5 to 30 seconds on one core.
# clang-tidy reads compile_commands.json of a build folder, build/tidy, which this script configures
# and in which it generates the headers of messages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build=build/tidy base='' all=0 files=()
while [[ $# -gt 0 ]]; do
  case "$1" in
    --build) build=${2:?--build needs a folder}; shift 2 ;;
    --base) base=${2:?--base needs a commit}; shift 2 ;;
    --all) all=1; shift ;;
    -h|--help) sed -n '4,11s/^# //p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "check_tidy.sh: unknown argument '$1'; see --help" >&2; exit 2 ;;
    *) files+=("$1"); shift ;;
  esac
done
if [[ "$build" == build/tidy ]]; then
  cmake --preset tidy >/dev/null
  ninja -C "$build" -t targets all | sed -n 's/^\(.*\.pb\.h\): .*/\1/p' | xargs ninja -C "$build" >/dev/null
elif [[ ! -f "$build/compile_commands.json" ]]; then
  echo "check_tidy.sh: $build has no compile_commands.json; configure it with cmake first" >&2
  exit 2
fi

if [[ $all -eq 1 ]]; then
  mapfile -t files < <(git ls-files '*.cc' ':!tests/')
elif [[ ${#files[@]} -eq 0 ]]; then
  if ! git rev-parse --verify --quiet "${base:-HEAD~1}^{commit}" >/dev/null; then
    [[ -z "$base" ]] && { echo "tidy: there is no commit before this one"; exit 0; }
    echo "check_tidy.sh: there is no commit $base" >&2
    exit 2
  fi
  mapfile -t files < <(git diff --name-only --diff-filter=d "${base:-HEAD~1}" -- '*.cc' '*.h' ':!tests/')
fi

# Sources that the build folder compiles; others, such as those for CUDA, have no command.
mapfile -t sources < <(printf '%s\n' "${files[@]/%.h/.cc}" | sort -u | python3 -c '
import json, pathlib, sys
commands = json.load(open(sys.argv[1], encoding="utf-8"))
compiled = {pathlib.Path(entry["directory"], entry["file"]).resolve() for entry in commands}
for line in sys.stdin:
    if line.strip() and pathlib.Path(line.strip()).resolve() in compiled:
        print(line.strip())' "$build/compile_commands.json")
if [[ ${#sources[@]} -gt 0 ]]; then
  # The check includes clang's own warnings about locks, and none of its others.
  printf '%s\0' "${sources[@]}" | xargs -0 -n 1 -P "$(nproc)" \
    clang-tidy-14 --quiet -p "$build" --extra-arg=-Wno-everything --extra-arg=-Wthread-safety \
    2> >(grep -v 'warnings\? generated' >&2)
fi
echo "tidy: ${#sources[@]} files"
