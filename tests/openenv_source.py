"""Where ``make openenv-source`` exports OpenEnv's own server tests and environments to; the repository has none.

A test that uses them has the mark `needs_openenv_source`, and its skip says how to get them.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "openenv_source.sh"
ABSENT = 69
"""Exit status of ``openenv_source.sh --where`` where they are not there."""

_asked = subprocess.run([SCRIPT, "--where"], capture_output=True, text=True, check=False)
assert _asked.returncode in (0, ABSENT), f"{SCRIPT} --where: {_asked.stderr}"

SOURCE = Path(_asked.stdout.removesuffix("\n"))
"""Top of the exported tree, which has OpenEnv's layout; also where nothing was exported."""
ENVIRONMENTS = SOURCE / "envs"
SUITE = SOURCE / "tests" / "core"

needs_openenv_source = pytest.mark.skipif(_asked.returncode == ABSENT, reason=_asked.stderr.strip())
