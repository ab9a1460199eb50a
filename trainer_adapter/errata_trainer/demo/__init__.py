"""``errata demo training``: a tiny policy, made on the spot, trains on the real terminal environment."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec

__all__ = ["main"]


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; return 0 when every channel had something to train on and every promise held."""
    missing = [name for name in ("torch", "trl") if find_spec(name) is None]
    if missing:
        print(
            f"errata demo training: {' and '.join(missing)} missing: pip install 'openenv-errata[trl]', "
            "or `make trainer` in a checkout",
            file=sys.stderr,
        )
        return 1
    from .cli import main as run

    return run(arguments)
