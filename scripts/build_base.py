"""Make the default base tree unless it is there: what ``make`` runs before anything that needs a sandbox."""

from __future__ import annotations

import os
import sys

from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.base_trees.tree import build_base


def main() -> int:
    """Return the exit status."""
    if os.geteuid() != 0:
        print("base: sandboxes need root: put sudo before make, or run `make test-unprivileged`", file=sys.stderr)
        return 1
    try:
        build_base(progress=lambda line: print(f"base: {line}", file=sys.stderr, flush=True))
    except SandboxUnavailable as error:
        print(f"base: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("base: interrupted; the next run starts anew with the packages that were fetched", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
