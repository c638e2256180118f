# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""A crumbd of the package in a temporary folder, for the examples beside this file."""

import contextlib
import pathlib
import subprocess
import tempfile
from typing import Iterator, Optional

import crumb

CONFIG = """\
listen:
  socket_dir: {folder}
admin:
  listen: 127.0.0.1:0
store:
  host:
    bytes_max: 256MiB
    slab_bytes: 2MiB
  ssd:
    path: {folder}/ssd
    bytes_max: 1GiB
"""


@contextlib.contextmanager
def socket_dir(given: Optional[str]) -> Iterator[str]:
    """`given`, or the socket folder of a crumbd that runs while the context is open."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "crumbd.yaml"
        config.write_text(CONFIG.format(folder=folder), encoding="utf-8")
        with open(pathlib.Path(folder) / "crumbd.log", "wb") as log:
            server = subprocess.Popen([crumb.path_of("crumbd"), "--config", str(config)],
                                      stdout=log, stderr=log)
        try:
            yield folder
        finally:
            server.terminate()
            server.wait(timeout=60)
