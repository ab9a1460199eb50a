"""Runs the benchmark as ``python -m errata_bench`` where the ``errata`` command is not installed."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
