"""The ``errata`` command: `commands` registers the commands, most of which have a module for each group.

`source` reads episodes over HTTP or from a data directory; `diagnostics` has the checks of ``errata doctor``. The other
modules parse options and print; other packages do the work. Programs of other packages are entry points of the group
``errata.programs``.
"""

from .commands import main

__all__ = ["main"]
