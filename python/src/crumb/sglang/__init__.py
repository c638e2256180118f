# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""Crumb in SGLang. These flags turn it on:

    python -m sglang.launch_server --model-path MODEL --dtype bfloat16 --page-size 64
        --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
        --unified-cache-external-linker-config '{"linker": "CrumbLinker",
            "linker_module_path": "crumb.sglang"}'

docs/engines/sglang.md is the guide.
"""

from crumb.sglang.linker import CrumbLinker

__all__ = ["CrumbLinker"]
