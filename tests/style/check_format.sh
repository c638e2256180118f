#!/usr/bin/env bash
# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
# Fails when a source file is not formatted, or lacks the licence lines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

mapfile -t sources < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh')
clang-format-14 --dry-run --Werror "${sources[@]}"
bad=0
while read -r file; do
  head -n 4 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || {
    echo "$file: no SPDX licence line" >&2
    bad=1
  }
done < <(git ls-files '*.h' '*.cc' '*.cu' '*.cuh' '*.proto' '*.sh' '*.py' '*.cmake' '*CMakeLists.txt')
echo "format: ${#sources[@]} files"
exit "$bad"
