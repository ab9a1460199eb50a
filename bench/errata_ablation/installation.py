"""`install_command`: how to install what trains."""

from __future__ import annotations

from importlib.metadata import distribution

from errata_protocol.install_hint import install_hint

DISTRIBUTION = "openenv-errata-bench"
EXTRA = "ablation"


def install_command() -> str:
    """Return the ``pip install`` command that adds what the ablation and its demo train and draw with."""
    return install_hint(EXTRA, distribution(DISTRIBUTION).read_text("direct_url.json"), DISTRIBUTION)
