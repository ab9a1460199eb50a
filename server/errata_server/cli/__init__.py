"""The ``errata`` command: `commands` registers the commands, most of which have a module for each group.

`source` gives them access to a journal; `diagnostics` has the checks of ``errata doctor``. The modules here handle
options and output only; the work is done in other packages.
"""

from .commands import main

__all__ = ["main"]
