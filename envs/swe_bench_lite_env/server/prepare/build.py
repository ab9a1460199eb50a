"""Builds the start of an instance in a sandbox: code of the repository runs at its installation already."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, Limits, Sandbox
from errata_server.sandbox.spec import SandboxSpec

from ...dataset import Instance
from ...recipes import Recipe
from .sources import build_key, pack_directory
from .store import EPOCH_S, SHELL_ENV, WORKDIR, Build, Store, demand

Progress = Callable[[str], None]

BUILD_LIMITS = Limits(
    memory_bytes=8 * 1024**3,
    pids=1024,
    file_size_bytes=8 * 1024**3,
    disk_bytes=24 * 1024**3,
    inodes=2_000_000,
    cpu_s=4 * 3600,
    open_files=4096,
)
INSTALL_TIMEOUT_S = 3600.0

_INSIDE = Path(__file__).with_name("inside")
_OUT = "/home/agent/.errata-out"
_PIECE = 64 * 1024**2


async def build(
    instance: Instance,
    recipe: Recipe,
    *,
    store: Store,
    backend: Backend,
    mirror: Path | None = None,
    again: bool = False,
    progress: Progress = lambda line: None,
) -> Build:
    """Return the build of an instance, made now where the store does not have it.

    Args:
        instance: The instance.
        recipe: Its recipe.
        store: Where builds are kept.
        backend: Makes the sandboxes that code runs in.
        mirror: Directory of bare git repositories.
        again: Build it anew.
        progress: Called with one line for each stage.

    Raises:
        SourceMissing: The code is not where the recipe says.
        EnvironmentFailed: A command of the recipe failed; the message has the end of its output.
        SandboxFailed: The sandbox broke.
    """
    key = await asyncio.to_thread(build_key, instance, recipe)
    known = None if again else store.find(instance, key)
    if known is not None:
        return known
    started = time.monotonic()
    await backend.start()
    store.directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=store.directory, prefix=".build-") as temporary:
        work = Path(temporary)
        progress(f"{instance.instance_id}: fetching the source")
        names = await asyncio.to_thread(_fetch, recipe, work)
        base, python, env = await base_id(backend), "/usr/bin/python3", dict(SHELL_ENV) | dict(recipe.env)
        sandbox = await backend.open(
            base=base, limits=BUILD_LIMITS, spec=SandboxSpec(workdir=WORKDIR, env=env, mtime_s=EPOCH_S)
        )
        try:
            await _unpack(sandbox, work, instance)
            progress(f"{instance.instance_id}: making the repository")
            await _finish(sandbox, work, names, instance)
            archive = await _pack(sandbox, work, instance)
        finally:
            await sandbox.destroy()
        tree, size = await asyncio.to_thread(store.add, archive)
    made = Build(
        instance_id=instance.instance_id,
        key=key,
        base=base,
        python=python,
        env=env,
        tree=tree,
        source=recipe.source.kind,
        size_bytes=size,
        seconds=round(time.monotonic() - started, 2),
        created=int(time.time()),
    )
    store.keep(made)
    return made


async def base_id(backend: Backend, name: str = "default") -> str:
    """Return the id of a base tree."""
    sandbox = await backend.open(base=name)
    try:
        return (await sandbox.snapshot()).ref.id
    finally:
        await sandbox.destroy()


def _fetch(recipe: Recipe, work: Path) -> list[str]:
    """Write the source as a tar archive; return the names of its files and links."""
    work.chmod(0o755)
    (work / "source").mkdir(mode=0o755)
    archive = work / "source" / "data.tar"
    if recipe.source.kind != "directory":
        raise EnvironmentFailed(f"sources of kind {recipe.source.kind} are not prepared yet")
    names = pack_directory(recipe.source_path, archive, EPOCH_S)
    archive.chmod(0o644)
    return names


async def _unpack(sandbox: Sandbox, work: Path, instance: Instance) -> None:
    result = await sandbox.run(
        f"tar -xpf /setup/data.tar -C {WORKDIR}", clean=True, mounts={"/setup": work / "source"}, timeout_s=600.0
    )
    demand(result, f"{instance.instance_id}: unpacking its source")


async def _finish(sandbox: Sandbox, work: Path, names: list[str], instance: Instance) -> None:
    programs = work / "programs"
    shutil.copytree(_INSIDE, programs, ignore=shutil.ignore_patterns("__pycache__"))
    config = {"root": WORKDIR, "sources": names, "time": EPOCH_S, "message": f"{instance.repo} at the base commit"}
    (programs / "finish.json").write_text(json.dumps(config), "ascii")
    for path in (programs, *programs.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    result = await sandbox.run(
        "cd / && exec /usr/bin/python3 -I -S /setup/finish.py /setup/finish.json",
        clean=True,
        mounts={"/setup": programs},
        timeout_s=900.0,
    )
    demand(result, f"{instance.instance_id}: making its repository")


async def _pack(sandbox: Sandbox, work: Path, instance: Instance) -> Path:
    """Return an archive of the work tree, carried out of the sandbox."""
    result = await sandbox.run(
        f"set -euo pipefail; rm -rf {_OUT}; mkdir {_OUT}; tar -C {WORKDIR} --sort=name --owner=0 --group=0 "
        f"--numeric-owner --format=posix --pax-option=delete=atime,delete=ctime -cf - . | gzip -n -1 | "
        f"split -b {_PIECE} -a 4 -d - {_OUT}/; ls {_OUT}",
        clean=True,
        timeout_s=1800.0,
    )
    demand(result, f"{instance.instance_id}: packing its work tree")
    archive = work / "tree.tar.gz"
    with archive.open("wb") as file:
        for piece in result.stdout.split():
            file.write(await sandbox.read_file(f"{_OUT}/{piece}", max_bytes=_PIECE))
    return archive
