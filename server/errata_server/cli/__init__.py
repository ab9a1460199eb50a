"""The ``errata`` command: one module for each group of commands, which imports what it runs when it runs.

`source` finds the episodes that a command reads, of a running server or on disk; `diagnostics` is ``errata doctor``.
"""

from .commands import main

__all__ = ["main"]
