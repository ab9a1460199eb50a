"""Print what training needs beside requirements/dev.lock, pinned; `make lock` writes requirements/trainer.lock with it.

pip resolves it, within what dev.lock has pinned: a wheel of torch may come from an index that others do not read.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OF_TORCHS_BUILD = ("nvidia-", "cuda-", "triton")
"""What a CUDA build of torch needs and a CPU build does not: it comes with torch, never from the lock."""
OURS = "openenv-errata"
"""What the names of our distributions begin with."""
HEADER = (
    "# What training needs beside dev.lock; `make lock` makes it. torch is installed first, with what its build needs."
)


def name_of(text: str) -> str:
    """Return the normalised name of a distribution."""
    return re.sub(r"[-_.]+", "-", text).lower()


def main() -> None:
    """Print the lock."""
    locked = {name_of(line.split("==")[0]) for line in (ROOT / "requirements/dev.lock").open() if "==" in line}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    command += ["-c", "requirements/dev.lock", *(sys.argv[1:] or ["torch"]), ".[tinker,cartridge]", "./bench[ablation]"]
    report = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
    pins = {name_of(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    print(HEADER)
    for name, version in sorted(pins.items()):
        if name not in locked and not name.startswith((OURS, *OF_TORCHS_BUILD)):
            print(f"{name}=={version.split('+')[0]}")


if __name__ == "__main__":
    main()
