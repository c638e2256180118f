# SPDX-FileCopyrightText: The Crumb authors
# SPDX-License-Identifier: Apache-2.0
"""The program `lmcache`, in which configurations may name the serde "crumb"."""

import sys

from lmcache.cli.main import main

import crumb.lmcache  # noqa: F401 - registers the serde

if __name__ == "__main__":
    sys.exit(main())
