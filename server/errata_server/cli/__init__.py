"""The ``errata`` command: `commands` registers one module for each group of commands; `source` is where they read.

`diagnostics` is what ``errata doctor`` tries. What a command does, beyond its options and output, belongs elsewhere.
"""

from .commands import main

__all__ = ["main"]
