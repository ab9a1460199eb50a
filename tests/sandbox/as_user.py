"""Programs run as an ordinary user by a test that root runs.

The interpreter, the sources and the base trees may lie where that user cannot go (``/root``). In a mount namespace of
its own the program finds them where they are, with nothing else in the closed directories above them.
"""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from pathlib import Path

from errata_server.sandbox.base_trees.tree import base_directories

UID = 64321
REPOSITORY = Path(__file__).parents[2]


def _closed_ancestor(path: Path) -> Path | None:
    """Return the topmost directory above ``path`` that other users may not pass."""
    for parent in reversed(path.parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            return parent
    return None


def _opening(hold: Path, paths: list[Path]) -> str:
    closed = {path: above for path in paths if path.exists() and (above := _closed_ancestor(path)) is not None}
    lines = [f"mount -t tmpfs -o mode=755 hold {hold}"]
    places = {path: hold / str(index) for index, path in enumerate(closed)}
    lines += [f"mkdir {place} && mount --bind {shlex.quote(str(path))} {place}" for path, place in places.items()]
    lines += [f"mount -t tmpfs -o mode=755 open {shlex.quote(str(above))}" for above in sorted(set(closed.values()))]
    lines += [f"mkdir -p {shlex.quote(str(path))}" for path in places]
    lines += [f"mount --bind {place} {shlex.quote(str(path))}" for path, place in places.items()]
    return "\n".join(lines)


def as_user(
    arguments: list[str], home: Path, *, base_dir: Path, timeout_s: float = 110.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run this interpreter with ``arguments`` as a made-up user, in the repository.

    Args:
        arguments: What follows ``python``.
        home: The user's home directory; below directories that everybody may pass.
        base_dir: ``ERRATA_BASE_DIR``.
        timeout_s: Bound on the run.
        environment: Further variables.
    """
    (home / "hold").mkdir(exist_ok=True)
    (home / "tmp").mkdir(exist_ok=True)
    for path in (home, home / "tmp"):
        os.chown(path, UID, UID)
    sources = [path for path in sys.path if path and Path(path).is_dir()]
    wanted = [Path(sys.base_prefix), Path(sys.prefix).resolve(), REPOSITORY, *base_directories(), *map(Path, sources)]
    inside: list[Path] = []
    for path in sorted(set(wanted)):
        if not any(path.is_relative_to(other) for other in inside):
            inside.append(path)
    variables = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(home),
        "TMPDIR": str(home / "tmp"),
        "ERRATA_BASE_DIR": str(base_dir),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": ":".join(sources),
        **environment,
    }
    program = ["env", "-i", *(f"{name}={value}" for name, value in variables.items()), sys.executable, *arguments]
    drop = f"setpriv --reuid={UID} --regid={UID} --clear-groups --inh-caps=-all --bounding-set=-all --no-new-privs"
    opening = _opening(home / "hold", inside)
    script = f"set -e\n{opening}\ncd {shlex.quote(str(REPOSITORY))}\nexec {drop} {shlex.join(program)}"
    return subprocess.run(
        ["unshare", "--mount", "--kill-child", "--fork", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
