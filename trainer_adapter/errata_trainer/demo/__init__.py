"""``errata demo training``: trains a tiny policy on the real terminal environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import distribution
from importlib.util import find_spec

from errata_protocol.install_hint import DISTRIBUTION, install_hint

__all__ = ["main"]


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo. Return 0 if every channel had something to train on and no episode was lost."""
    missing = [name for name in ("torch", "trl") if find_spec(name) is None]
    if missing:
        install = install_hint("trl", distribution(DISTRIBUTION).read_text("direct_url.json"))
        print(
            f"errata demo training: {' and '.join(missing)} missing: {install}, or `make trainer` in a checkout",
            file=sys.stderr,
        )
        return 1
    from .cli import main as run

    return run(arguments)
