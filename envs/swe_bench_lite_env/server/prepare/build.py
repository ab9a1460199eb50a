"""Builds the start of an instance: an environment that a version's instances share, and a repository of one commit.

Code of the repository runs while it is installed. So everything runs in a sandbox, as the agent's user and without a
network; the package index is answered over a socket (`index`). What comes out are archives. They become a base tree
(root's, read only) and the start of the sessions on it.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from errata_protocol.errors import EnvironmentFailed, SandboxUnavailable
from errata_server.sandbox.base import Backend, CommandResult, Limits, Sandbox
from errata_server.sandbox.base_trees.derived import derive_base, remove_base
from errata_server.sandbox.base_trees.importer import import_base
from errata_server.sandbox.base_trees.tree import AGENT_UID, BaseTree, base_directories, find_base
from errata_server.sandbox.spec import DEFAULT_PATH, Directory, SandboxSpec

from ...dataset import Instance
from ...recipes import BASE_PYTHON, Recipe
from ..patches import applicable
from . import interpreters
from .images import base_id, image_id
from .index import SOCKET, PackageIndex, lent
from .interpreters import ENVIRONMENT, Interpreter
from .reach import copies, project_packages
from .sources import LEFT_OUT, MOUNT, Fetched, SourceMissing, build_key, fetch, pack_tree
from .store import EPOCH_S, HOME, SHELL_ENV, START_LIMITS, WORKDIR, Build, Store, demand

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
"""Of one command of a recipe."""

_PYTHONS = (
    "/opt/miniconda3/envs/testbed/bin/python",
    f"{ENVIRONMENT}/bin/python",
    "/usr/local/bin/python3",
    "/usr/bin/python3",
)
"""Where the Python of the tests may be in a root file system; the first is that of the benchmark's images."""

_ENVIRONMENT_FORMAT = 1
"""Raise it whenever the same pins and commands would be installed into something else."""
_STEP_TIMEOUT_S = 1800.0
_INSIDE = Path(__file__).with_name("inside")
_HOME = "/tmp/build"
_OUT = f"{_HOME}/out"
_PORT = 3141
_PIECE = 64 * 1024**2
_PROGRAM = "/usr/bin/python3 -I -S /setup"
_GONE_STATUS = 3
_NO_COMMIT_STATUS = 41
_PIP = """\
[global]
index-url = http://127.0.0.1:{port}/simple
disable-pip-version-check = true
no-input = true
timeout = 120
[install]
compile = no
"""
_DISTUTILS = "[easy_install]\nindex_url = http://127.0.0.1:{port}/simple\n"
_OLD_PIP = "import pip, sys; sys.exit(tuple(int(part) for part in pip.__version__.split('.')[:2]) < (21, 3))"
"""21.3 is the first that installs projects without setup.py in place, and the last for Python 3.6."""


class Builder:
    """Builds instances into a store.

    Args:
        store: Store that keeps the builds.
        backend: Backend that makes the sandboxes that code runs in.
        bases: Directories of base trees that the operator named, by name.
        mirror: Directory of git repositories; None if there is none.
        index: Package index to install from; None uses the one that pip is configured to use.
        progress: Function that is called with one line for each stage.
    """

    def __init__(
        self,
        store: Store,
        backend: Backend,
        *,
        bases: Mapping[str, Path] = MappingProxyType({}),
        mirror: Path | None = None,
        index: PackageIndex | None = None,
        progress: Progress = lambda line: None,
    ) -> None:
        self.store = store
        self.backend = backend
        self.mirror = mirror
        self.index = index or PackageIndex(store.packages)
        self.progress = progress
        self._bases = bases

    async def build(self, instance: Instance, recipe: Recipe, *, again: bool = False) -> Build:
        """Return the build of an instance, made now where the store does not have it.

        Args:
            instance: The instance.
            recipe: Its recipe.
            again: Build it anew; what it shares with others stays.

        Raises:
            SourceMissing: The code is not at the place that the recipe names.
            InterpreterMissing: This machine does not have the recipe's Python.
            IndexFailed: The package index does not answer, or has not what the recipe asks for.
            EnvironmentFailed: A patch does not apply, or a command of the recipe failed; the message has the end of its
                output.
            SandboxFailed: The sandbox broke.
        """
        key = await asyncio.to_thread(build_key, instance, recipe)
        image = await image_id(self.backend, recipe) if recipe.source.kind == "image" else None

        def known() -> Build | None:
            found = None if again else self.store.find(instance, key)
            usable = found and (self.base(found.base) is not None if image is None else found.base == image)
            return found if usable else None

        if (found := known()) is not None:
            return found
        await self.backend.start()
        await asyncio.to_thread(self.store.make)
        async with self.store.locked(f"build-{key[:32]}", self.progress):
            if (found := known()) is not None:
                return found  # another process made it meanwhile
            started = time.monotonic()
            work = Path(await asyncio.to_thread(tempfile.mkdtemp, dir=self.store.directory, prefix=".build-"))
            try:
                made = await _Job(self, instance, recipe, key, work, image).run()
            finally:
                await asyncio.to_thread(shutil.rmtree, work, ignore_errors=True)
            made = replace(made, seconds=round(time.monotonic() - started, 2), created=int(time.time()))
            self.store.keep(made)
            return made

    def base(self, name: str) -> BaseTree | None:
        """Return a base tree of this machine, or None for an unknown name or id."""
        try:
            return find_base(name, self._bases)
        except SandboxUnavailable:
            return None

    def default_base(self) -> BaseTree:
        """Return the base tree that all others are made from.

        Raises:
            SandboxUnavailable: It was not built yet.
        """
        return find_base("default", self._bases)


def _size(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if not path.is_dir())


def _is_there(root: Path, place: str) -> bool:
    return os.path.lexists(root / place.lstrip("/"))  # its target may be absolute, and is then inside


class _Job:
    """One build of one instance."""

    def __init__(
        self, builder: Builder, instance: Instance, recipe: Recipe, key: str, work: Path, image: str | None
    ) -> None:
        self._builder = builder
        self._store, self._backend = builder.store, builder.backend
        self._instance, self._recipe, self._key, self._work = instance, recipe, key, work
        self._image = image
        self._notes: list[str] = []
        self._mounts: dict[str, Path] = {}

    async def run(self) -> Build:
        await asyncio.to_thread(self._copy_programs)
        if self._recipe.source.kind == "tree":
            return await self._from_root_file_system()
        if self._image is not None:
            return await self._from_image(self._image)
        self._say(f"fetching the source ({self._recipe.source.kind})")
        source = await asyncio.to_thread(
            fetch,
            self._instance,
            self._recipe,
            index=self._builder.index,
            mirror=self._builder.mirror,
            work=self._work,
            mtime_s=EPOCH_S,
        )
        self._mounts = {"/setup": self._work / "programs", MOUNT: source.directory}
        if self._recipe.python == BASE_PYTHON:
            return await self._plain(source)
        return await self._with_environment(source)

    async def _plain(self, source: Fetched) -> Build:
        """Build on the default base tree, with nothing installed."""
        base = await base_id(self._backend)
        env = {**SHELL_ENV, **self._recipe.env}
        sandbox = await self._open(base)
        try:
            await self._unpack(sandbox, source)
            tree, size = await self._repository(sandbox)
        finally:
            await sandbox.destroy()
        whole = await asyncio.to_thread(self._builder.base, base)
        if whole is not None:  # on other backends base trees are not files of this machine
            base = (await self._without_copies(whole, tree)).id
        return self._build(
            base=base, python="/usr/bin/python3", env=env, tree=tree, size_bytes=size, source=source.words
        )

    async def _from_root_file_system(self) -> Build:
        """Build on a root file system that has all of it: the environment stays, the repository is made anew."""
        recipe, work = self._recipe, self._work
        path = recipe.source_path
        self._say(f"importing {path.name}")
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self._instance.instance_id).strip("-.")[:60]
        name = f"swe-image-{slug}"
        there = await asyncio.to_thread(lambda: {place.name for place in base_directories()[0].glob("*")})
        imported = await asyncio.to_thread(import_base, path, f"{name}-whole", progress=self._builder.progress)
        try:
            code = imported.root / WORKDIR.lstrip("/")
            if not code.is_dir():
                raise SourceMissing(f"{recipe.instance_id}: {path} has no {WORKDIR}: that is where the code has to be")
            # What lies there belongs to root, with all its history: sessions get a copy of their own.
            size = await asyncio.to_thread(_size, imported.root)
            about = {"added_bytes": size}  # the tree that it shares its files with goes again
            without = (WORKDIR.lstrip("/"),)
            base = await asyncio.to_thread(derive_base, imported, name, [], without=without, about=about)
            self._store.keep_base(hashlib.sha256(f"image{self._key}".encode()).hexdigest(), base.id, name)
            source = await asyncio.to_thread(pack_tree, code, work, EPOCH_S)
        finally:
            if imported.id not in there:  # a base tree of ours keeps its id, and may have been here before
                await asyncio.to_thread(remove_base, imported.id)
        python = next((place for place in _PYTHONS if _is_there(base.root, place)), "")
        if not python:
            raise SourceMissing(f"{recipe.instance_id}: {path} has no Python at {', '.join(_PYTHONS)}")
        self._mounts = {"/setup": work / "programs", MOUNT: source.directory}
        sandbox = await self._open(await base_id(self._backend))
        try:
            await self._unpack(sandbox, source)
            tree, size = await self._repository(sandbox)
        finally:
            await sandbox.destroy()
        env = {**SHELL_ENV, "PATH": f"{os.path.dirname(python)}:{DEFAULT_PATH}", **recipe.env}  # noqa: PTH120 - inside
        base = await self._without_copies(base, tree)
        words = f"root file system {path.name}"
        return self._build(base=base.id, python=python, env=env, tree=tree, size_bytes=size, source=words)

    async def _from_image(self, image: str) -> Build:
        """Build on an image of the engine that has all of it: the environment stays, the repository is made anew."""
        name, place = self._recipe.source.name, self._work / "source"
        self._say(f"copying {WORKDIR} of {name}")
        place.mkdir(mode=0o755)
        source = Fetched(place, f"tar -xpf {MOUNT}/data.tar", f"image {name}")
        sandbox = await self._backend.open(base=image, limits=START_LIMITS)  # nothing is installed
        try:
            there = (await self._run(sandbox, f"ls -d {WORKDIR} {' '.join(_PYTHONS)}")).stdout.split()
            python = next((one for one in _PYTHONS if one in there), "")
            if WORKDIR not in there or not python:
                raise SourceMissing(
                    f"{self._recipe.instance_id}: {name} has not both {WORKDIR} and a Python at {', '.join(_PYTHONS)}"
                )
            excluded = " ".join(f"--exclude={shlex.quote(pattern)}" for pattern in (*LEFT_OUT, "*.pyc"))
            pack = f"mkdir -p {_OUT} && tar -C {WORKDIR} {excluded} -cf {_OUT}/data.tar ."
            await self._step(sandbox, pack, f"packing {WORKDIR}")
            archive = await self._carry(sandbox, f"{_OUT}/data.tar", place / "data.tar")
            users = await sandbox.read_file("/etc/passwd")
        finally:
            await sandbox.destroy()
        await asyncio.to_thread(archive.chmod, 0o644)
        self._mounts = {"/setup": self._work / "programs", MOUNT: place}
        sandbox = await self._open(image, limits=START_LIMITS)
        try:
            await self._unpack(sandbox, source)
            del self._mounts[MOUNT]  # a container gets a copy for every command
            tree, size = await self._repository(sandbox)
        finally:
            await sandbox.destroy()
        programs, _, _ = python.rpartition("/")
        env = {**SHELL_ENV, "PATH": f"{programs}:{DEFAULT_PATH}", "HOME": HOME}
        if python == _PYTHONS[0]:
            env |= {"CONDA_DEFAULT_ENV": "testbed", "CONDA_PREFIX": programs.removesuffix("/bin")}
        system, system_size = await asyncio.to_thread(self._keep_own, await asyncio.to_thread(self._users, users))
        return self._build(
            base=image,
            python=python,
            env={**env, **self._recipe.env},
            tree=tree,
            system=system,
            size_bytes=size + system_size,
            source=source.words,
        )

    def _users(self, known: bytes) -> Path:
        """Write an archive with the list of users of an image, to which the agent's is added."""
        archive = self._work / "own.tar"
        with tarfile.open(archive, "w") as opened:
            member = tarfile.TarInfo("etc/passwd")
            content = known.rstrip(b"\n") + f"\nagent:x:{AGENT_UID}:{AGENT_UID}::{HOME}:/bin/bash\n".encode()
            member.size, member.mode = len(content), 0o644
            opened.addfile(member, io.BytesIO(content))
        return archive

    async def _with_environment(self, source: Fetched) -> Build:
        """Build with the recipe's Python and what it installs, on a base tree shared with others of the version."""
        recipe, store = self._recipe, self._store
        interpreter = await asyncio.to_thread(interpreters.find, recipe.python)
        if recipe.python.count(".") == 2 and recipe.python != interpreter.version:
            self._notes.append(f"Python {interpreter.version} stands for {recipe.python}, which is not on this machine")
        python_base = await self._python_base(interpreter)
        parts = (
            _ENVIRONMENT_FORMAT,
            python_base.id,
            self._instance.repo,
            self._instance.version,
            recipe.pins,
            recipe.install,
        )
        digest = hashlib.sha256(json.dumps((*parts, sorted(recipe.env.items()))).encode()).hexdigest()
        async with store.locked(f"environment-{digest[:32]}", self._builder.progress):
            for name in (digest, hashlib.sha256(f"{digest}{self._key}".encode()).hexdigest()):
                shared = self._builder.base(store.base_of(name) or ".")
                made = await self._install(source, interpreter, python_base, shared, name)
                if made is not None:
                    return made
                self._notes.append("its environment is its own: its installation removes something that others share")
        raise AssertionError("an environment of its own has nothing that others share")

    async def _python_base(self, interpreter: Interpreter) -> BaseTree:
        """Return the default base tree with an interpreter."""
        default = self._builder.default_base()
        digest = hashlib.sha256(f"{default.id}{interpreter.digest}".encode()).hexdigest()
        async with self._store.locked(f"python-{digest[:32]}", self._builder.progress):
            known = self._builder.base(self._store.base_of(digest) or ".")
            if known is not None:
                return known
            self._say(f"copying Python {interpreter.version} into a base tree")
            archive = await asyncio.to_thread(interpreters.pack, interpreter, default.root, self._work, EPOCH_S)
            name = f"swe-python-{interpreter.version}"
            made = await asyncio.to_thread(derive_base, default, name, [archive], progress=self._builder.progress)
            await asyncio.to_thread(archive.unlink)
            await self._try_interpreter(made, interpreter)
            self._store.keep_base(digest, made.id, name)
            return made

    async def _try_interpreter(self, base: BaseTree, interpreter: Interpreter) -> None:
        sandbox = await self._backend.open(base=base.id)
        try:
            command = (
                f"{interpreters.HOME}/bin/python3 -I -c 'import ctypes, hashlib, json, ssl, subprocess, venv, zlib'"
            )
            result = await sandbox.run(command, clean=True, timeout_s=120.0)
        finally:
            await sandbox.destroy()
        if result.exit_code != 0:
            raise EnvironmentFailed(
                f"Python {interpreter.version} of {interpreter.prefix} does not run in the base tree "
                f"({(result.stderr or result.stdout).strip()[-300:]}): give the base tree the release of this machine "
                "(`errata base build`), or install a Python that was built for its release"
            )

    async def _install(
        self, source: Fetched, interpreter: Interpreter, python_base: BaseTree, shared: BaseTree | None, digest: str
    ) -> Build | None:
        """Install the recipe on a shared environment, or make that; None where it cannot be shared."""
        recipe, out = self._recipe, self._work
        sandbox = await self._open(python_base.id, Directory(ENVIRONMENT, owner="agent"))
        try:
            with lent(self._builder.index, self._work / "index"):
                self._mounts["/index"] = self._work / "index"
                await self._unpack(sandbox, source)
                if shared is None:
                    await self._new_environment(sandbox)
                else:
                    self._mounts["/shared"] = shared.root / ENVIRONMENT.lstrip("/")
                    await self._step(
                        sandbox,
                        f"cp -a /shared/. {ENVIRONMENT}/ && chmod -R u+w {ENVIRONMENT}",
                        "copying the environment",
                    )
                listing = f"{_HOME}/before.json"
                await self._step(
                    sandbox, f"{_PROGRAM}/survey.py list {ENVIRONMENT} {listing}", "listing the environment"
                )
                extra = await self._version(sandbox, source)
                for command in recipe.install:
                    await self._installed(sandbox, command, extra)
                if recipe.pins and recipe.install:
                    await self._installed(sandbox, self._pins())
            self._say("packing the environment")
            task = "split" if shared is None else "difference"
            archives = f"{_OUT}/shared.tar {_OUT}/own.tar" if shared is None else f"{_OUT}/own.tar"
            result = await self._run(
                sandbox, f"{_PROGRAM}/survey.py {task} {ENVIRONMENT} {listing} {WORKDIR} {archives} {EPOCH_S}"
            )
            if result.exit_code == _GONE_STATUS and shared is not None:
                return None
            demand(result, f"{self._instance.instance_id}: packing the environment")
            tree, size = await self._repository(sandbox)
            own = await self._carry(sandbox, f"{_OUT}/own.tar", out / "own.tar")
            if shared is None:
                archive = await self._carry(sandbox, f"{_OUT}/shared.tar", out / "shared.tar")
        finally:
            await sandbox.destroy()
        if shared is None:
            # Without the version: where those of two versions are equal, they are one tree.
            slug = re.sub(r"[^A-Za-z0-9.]+", "-", self._instance.repo).strip("-.")
            name = f"swe-{slug[:60]}-py{interpreter.minor}"
            shared = await asyncio.to_thread(derive_base, python_base, name, [archive], progress=self._builder.progress)
            self._store.keep_base(digest, shared.id, name)
        shared = await self._without_copies(shared, tree)
        system, system_size = await asyncio.to_thread(self._keep_own, own)
        env = {
            **SHELL_ENV,
            "PATH": f"{ENVIRONMENT}/bin:{DEFAULT_PATH}",
            "VIRTUAL_ENV": ENVIRONMENT,
            **recipe.env,
        }
        return self._build(
            base=shared.id,
            python=f"{ENVIRONMENT}/bin/python",
            env=env,
            tree=tree,
            system=system,
            size_bytes=size + system_size,
            source=source.words,
            interpreter=interpreter.version,
        )

    async def _without_copies(self, base: BaseTree, tree: str) -> BaseTree:
        """Return a base tree without copies of the project in the archive ``tree``: the same one where it has none."""
        packages = await asyncio.to_thread(project_packages, self._store.archive(tree), self._instance.repo)
        without = await asyncio.to_thread(copies, base.root, packages)
        if not without:
            return base
        self._notes.append(f"without its copies of the project: {', '.join(without)}")
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self._instance.repo).strip("-.")
        name = f"swe-{slug[:60]}-visible"
        made = await asyncio.to_thread(derive_base, base, name, [], without=without, progress=self._builder.progress)
        self._store.keep_base(hashlib.sha256(f"visible{made.id}".encode()).hexdigest(), made.id, name)
        return made

    async def _new_environment(self, sandbox: Sandbox) -> None:
        self._say("making the environment")
        python = f"{interpreters.HOME}/bin/python3"
        made = await self._run(sandbox, f"{python} -m venv {ENVIRONMENT}")
        if made.exit_code != 0:
            # A distribution's Python comes without pip, so pip has to install itself.
            wheel = await asyncio.to_thread(self._pip_wheel)
            await self._step(sandbox, f"rm -rf {ENVIRONMENT}/*; {python} -m venv --without-pip {ENVIRONMENT}", "venv")
            quoted = shlex.quote(f"/setup/{wheel}")
            await self._installed(sandbox, f"{ENVIRONMENT}/bin/python {quoted}/pip install {quoted} setuptools")
        old = await self._run(sandbox, f'{ENVIRONMENT}/bin/python -c "{_OLD_PIP}"')
        if old.exit_code != 0:
            await self._installed(sandbox, "python -m pip install 'pip>=21.3,<24'")
        if self._recipe.pins:
            await self._installed(sandbox, self._pins())

    def _pip_wheel(self) -> str:
        """Put a wheel of pip that runs on every Python of the benchmark beside the programs; return its name."""
        links = [link for link in self._builder.index.links("pip") if link.filename == "pip-21.3.1-py3-none-any.whl"]
        if not links:
            raise EnvironmentFailed("this Python has no ensurepip, and the package index has no pip 21.3.1")
        wheel = self._builder.index.fetch(links[0])
        shutil.copyfile(wheel, self._work / "programs" / wheel.name)
        (self._work / "programs" / wheel.name).chmod(0o644)
        return wheel.name

    def _pins(self) -> str:
        return "python -m pip install " + " ".join(map(shlex.quote, self._recipe.pins))

    async def _version(self, sandbox: Sandbox, source: Fetched) -> dict[str, str]:
        """Return the variables that give a project its version where no tag and no metadata do."""
        version = self._instance.version
        if source.words.startswith("sdist") or not re.fullmatch(r"\d+(\.\d+)*", version):
            return {}
        if source.is_repository:
            described = await self._run(sandbox, f"cd {WORKDIR} && git describe --tags --match '*[0-9]*'")
            if described.exit_code == 0:
                return {}
        return {"SETUPTOOLS_SCM_PRETEND_VERSION": version}

    async def _unpack(self, sandbox: Sandbox, source: Fetched) -> None:
        await self._step(sandbox, f"mkdir -p {_OUT} {_HOME}/tmp && cp /setup/.pydistutils.cfg {_HOME}/", "beginning")
        result = await self._run(sandbox, f"cd {WORKDIR} && {{ {source.command}\n}}")
        if result.exit_code == _NO_COMMIT_STATUS and source.is_repository:
            readable = await asyncio.to_thread(self._readable_copy, source.directory)
            self._mounts[MOUNT] = readable
            await self._step(sandbox, f"rm -rf {WORKDIR}/.git", "beginning again")
            result = await self._run(sandbox, f"cd {WORKDIR} && {{ {source.command}\n}}")
            if result.exit_code == _NO_COMMIT_STATUS:
                raise SourceMissing(
                    f"{self._instance.instance_id}: {source.directory} does not have the commit of {source.words}: "
                    "fetch it into the mirror"
                )
        demand(result, f"{self._instance.instance_id}: unpacking {source.words}")
        await self._step(sandbox, f"{_PROGRAM}/list_files.py {WORKDIR} {_HOME}/sources.json", "listing the source")
        for name, patch in (("test", self._instance.test_patch), ("gold", self._instance.patch)):
            if patch.strip():  # before the build, which is long: an archive of the index may lack the tests
                given = applicable(patch)
                command = f"cd {WORKDIR} && git apply --check --whitespace=nowarn -"
                result = await sandbox.run(command, clean=True, stdin=given, timeout_s=_STEP_TIMEOUT_S)
                demand(result, f"{self._instance.instance_id}: its {name} patch does not apply to {source.words}: git")

    def _readable_copy(self, directory: Path) -> Path:
        """Return a copy of a repository that the agent's user may read: a mirror's modes may be its owner's only."""
        copy = self._work / "repository"
        shutil.copytree(directory, copy, symlinks=True)
        for path in (copy, *copy.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() else 0o644)
        return copy

    async def _repository(self, sandbox: Sandbox) -> tuple[str, int]:
        """Make the repository of one commit, and keep the work tree; return the archive's digest and size."""
        self._say("making the repository")
        await self._step(
            sandbox, f"{_PROGRAM}/finish.py /setup/finish.json {_HOME}/sources.json", "making the repository"
        )
        archive = f"{_OUT}/tree.tar.gz"
        await self._step(
            sandbox,
            f"set -o pipefail; tar -C {WORKDIR} --sort=name --owner=0 --group=0 --numeric-owner --format=posix "
            f"--pax-option=delete=atime,delete=ctime -cf - . | gzip -n -1 > {archive}",
            "packing the work tree",
        )
        carried = await self._carry(sandbox, archive, self._work / "tree.tar.gz")
        return await asyncio.to_thread(self._store.add, carried)

    async def _open(self, base: str, *entries: Directory, limits: Limits = BUILD_LIMITS) -> Sandbox:
        spec = SandboxSpec(workdir=WORKDIR, entries=entries, mtime_s=EPOCH_S, empty=True)
        return await self._backend.open(base=base, limits=limits, spec=spec)

    async def _installed(self, sandbox: Sandbox, command: str, extra: Mapping[str, str] = MappingProxyType({})) -> None:
        """Run a command that may install: in the work tree, with the environment and the package index."""
        self._say(command if len(command) < 100 else command[:97] + "...")
        wrapped = f"{_PROGRAM}/with_index.py /index/{SOCKET} {_PORT} /bin/bash -c {shlex.quote(command)}"
        result = await self._run(sandbox, f"cd {WORKDIR} && exec {wrapped}", extra=extra, timeout_s=INSTALL_TIMEOUT_S)
        demand(result, f"{self._instance.instance_id}: `{command}` of its recipe")

    async def _step(self, sandbox: Sandbox, command: str, what: str) -> None:
        demand(await self._run(sandbox, command), f"{self._instance.instance_id}: {what}")

    async def _run(
        self,
        sandbox: Sandbox,
        command: str,
        *,
        extra: Mapping[str, str] = MappingProxyType({}),
        timeout_s: float = _STEP_TIMEOUT_S,
    ) -> CommandResult:
        env = {
            **SHELL_ENV,
            "PATH": f"{ENVIRONMENT}/bin:{DEFAULT_PATH}",
            "HOME": _HOME,
            "TMPDIR": f"{_HOME}/tmp",
            "VIRTUAL_ENV": ENVIRONMENT,
            "PIP_CONFIG_FILE": "/setup/pip.conf",
            "SOURCE_DATE_EPOCH": str(EPOCH_S),
            **extra,
            **self._recipe.env,
        }
        return await sandbox.run(command, clean=True, env=env, mounts=self._mounts, timeout_s=timeout_s)

    async def _carry(self, sandbox: Sandbox, path: str, target: Path) -> Path:
        """Copy a file out of a sandbox."""
        result = await self._run(
            sandbox, f"cd {_OUT} && split -b {_PIECE} -a 4 -d {path} piece- && rm {path} && ls piece-*"
        )
        demand(result, f"{self._instance.instance_id}: dividing {path}")
        with target.open("wb") as file:
            for piece in result.stdout.split():
                content = await sandbox.read_file(f"{_OUT}/{piece}", max_bytes=_PIECE)
                await asyncio.to_thread(file.write, content)  # takes the processor for longer than a loop may wait
        await self._step(sandbox, f"rm {_OUT}/piece-*", "clearing")
        return target

    def _copy_programs(self) -> None:
        programs = self._work / "programs"
        shutil.copytree(_INSIDE, programs, ignore=shutil.ignore_patterns("__pycache__"))
        config = {"root": WORKDIR, "time": EPOCH_S, "message": f"{self._instance.repo} at the base commit"}
        config["heed_ignore"] = self._recipe.source.kind in ("tree", "image")
        (programs / "finish.json").write_text(json.dumps(config), "ascii")
        (programs / "pip.conf").write_text(_PIP.format(port=_PORT), "ascii")
        (programs / ".pydistutils.cfg").write_text(_DISTUTILS.format(port=_PORT), "ascii")
        for path in (self._work, programs, *programs.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)

    def _keep_own(self, archive: Path) -> tuple[str, int]:
        packed = self._work / "own.tar.gz"
        with packed.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as target:
            target.write(archive.read_bytes())
        return self._store.add(packed)

    def _build(
        self,
        *,
        base: str,
        python: str,
        env: Mapping[str, str],
        tree: str,
        size_bytes: int,
        source: str,
        system: str = "",
        interpreter: str = "",
    ) -> Build:
        return Build(
            instance_id=self._instance.instance_id,
            key=self._key,
            base=base,
            python=python,
            env=env,
            tree=tree,
            system=system,
            source=source,
            interpreter=interpreter,
            size_bytes=size_bytes,
            notes=tuple(self._notes),
        )

    def _say(self, line: str) -> None:
        self._builder.progress(f"{self._instance.instance_id}: {line}")
