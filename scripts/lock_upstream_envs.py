"""Print what OpenEnv's environments in tests/upstream_envs import beside requirements/dev.lock, pinned.

``make lock`` writes requirements/upstream-envs.lock with it. What they need stands in their pyproject.toml files, which
are not in this repository (``make openenv-source``), so it is repeated here.
"""

from __future__ import annotations

import json
import subprocess
import sys

from lock_trainer import ROOT, name_of

NEEDED = (
    "smolagents>=1.22,<2",  # coding_env, repl_env
    "pypdf>=6.12",  # repl_env
    "reasoning-gym>=0.1.24",
    "marlenv>=1.0",  # snake_env
    "gym==0.24.1",  # snake_env
    "chess",
    "setuptools>=77",  # builds their archives
    "wheel",
)
ALONE = "moonfish==0.0.1"
"""chess_env's engine. It asks for a web server, an installer and four linters, of which the engine imports none."""
HEADER = "# What OpenEnv's environments in tests/upstream_envs need beside dev.lock; `make lock` makes it."


def main() -> None:
    """Print the lock."""
    locked = {name_of(line.split("==")[0]) for line in (ROOT / "requirements/dev.lock").open() if "==" in line}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["-c", "requirements/dev.lock", *NEEDED]
    report = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    pins = {name_of(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    kept = {f"{name}=={version}" for name, version in pins.items() if name not in locked or name == "setuptools"}
    print("\n".join([HEADER, *sorted({*kept, ALONE})]))


if __name__ == "__main__":
    main()
