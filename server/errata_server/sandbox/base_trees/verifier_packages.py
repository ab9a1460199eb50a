"""Installs the Python packages of verifiers into a base tree that is being built, with this machine's pip or uv.

pip reads its usual configuration (``PIP_INDEX_URL``, ``pip.conf``, ``PIP_FIND_LINKS``), so the packages come from the
index that this machine uses, or from a directory of wheels. The recipe has their hashes.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from errata_protocol.errors import SandboxUnavailable

from .apt_source import proxy_environment
from .recipe import VERIFIER_DIRECTORY, VERIFIER_PACKAGES

_TIMEOUT_S = 600.0


def install_verifier_packages(root: Path) -> None:
    """Install `VERIFIER_PACKAGES` into `VERIFIER_DIRECTORY` below ``root``, without byte code.

    Raises:
        SandboxUnavailable: There is no pip or uv, or it failed; the message, one line, says what to do.
    """
    target = root / VERIFIER_DIRECTORY
    python = next((path for path in sorted((root / "usr/bin").glob("python3.*")) if path.name[8:].isdigit()), None)
    if python is None:
        raise SandboxUnavailable("the new tree has no python3: report this")
    with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="ascii") as pins:
        for name, version, digest in VERIFIER_PACKAGES:
            pins.write(f"{name}=={version} --hash=sha256:{digest}\n")
        pins.flush()
        _run([*_installer(python.name.removeprefix("python")), "--target", str(target), "-r", pins.name])
    shutil.rmtree(target / "bin", ignore_errors=True)  # scripts that name this machine's interpreter
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _installer(version: str) -> list[str]:
    """Return the command of pip, or else of uv, that installs wheels for a version of Python."""
    common = [
        "install",
        "--quiet",
        "--no-deps",
        "--require-hashes",
        "--only-binary",
        ":all:",
        "--python-version",
        version,
    ]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return [*pip, *common, "--no-compile", "--no-user", "--ignore-installed", "--root-user-action", "ignore"]
    uv = shutil.which("uv")
    if uv is None:
        raise SandboxUnavailable(
            f"a base tree needs pip once, to fetch the packages of verifiers: run `{sys.executable} -m ensurepip`, or "
            "install uv, then this again"
        )
    return [uv, "pip", *common]


def _run(command: list[str]) -> None:
    """Run an installer; raise SandboxUnavailable if it fails."""
    environment = {**os.environ, **proxy_environment()}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, umask=0o022
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"{command[0]} could not install the packages of verifiers: {error}") from error
    if done.returncode != 0:
        complaints = [line for line in done.stderr.splitlines() if line.startswith(("ERROR", "error"))]
        why = "; ".join(complaints[-2:]) or done.stderr.strip()[-300:]
        raise SandboxUnavailable(
            f"the packages of verifiers could not be installed ({why}): name a Python index with PIP_INDEX_URL, or a "
            "directory of wheels with PIP_FIND_LINKS and PIP_NO_INDEX=1, then run this again"
        )
