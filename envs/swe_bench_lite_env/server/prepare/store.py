"""Prepared instances on disk, and the catalogue that creates the start of a sandbox from them.

    store/
        instances/<instance id>/<build key>.json    what was built, from what, and what its validation found
        objects/<sha256>/data.tar.gz                archives of work trees, shared by equal content

Everything is named by what it was made of, and appears whole or not at all. The base trees lie with all others
(`errata_server.sandbox.base_trees`).
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import tarfile
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from errata_environment.shared_builds import SharedBuilds
from errata_os.user_cache import user_cache
from errata_protocol.errors import EnvironmentFailed, ErrataError, InvalidRequest, SandboxFailed, SandboxUnavailable
from errata_protocol.names import INSTANCE, member_path
from errata_protocol.printable import printable_lines
from errata_server.sandbox.base import Backend, CommandResult, Limits, Sandbox, SandboxSnapshot
from errata_server.sandbox.base_trees.derived import using
from errata_server.sandbox.spec import DEFAULT_PATH, Directory, Entry, File, SandboxSpec, Symlink

from ...dataset import Instance
from ...recipes import Recipe
from .images import image_id, inputs
from .sources import SourceMissing, build_key

VALIDATOR = 3
"""Raise it whenever a validation could find something else: resets refuse those of other versions."""
_DIGEST_VERSION = 2
"""Raise it when the parts of `prepared_digest` change: open episodes and validations are lost then."""

DIRECTORY_VARIABLE = "ERRATA_SWE_STORE"
"""Directory of prepared instances; default: ``errata/swe`` in the user's cache directory."""

WORKDIR, HOME = "/testbed", "/home/agent"
EPOCH_S = 1767225600
"""2026-01-01T00:00:00Z: the time of all files of a start, so that two starts are equal byte for byte."""

SHELL_ENV: Mapping[str, str] = MappingProxyType(
    {
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "TZ": "UTC",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": DEFAULT_PATH,
    }
)
"""Exported in every first shell, under the variables of the recipe."""

START_LIMITS = Limits(
    memory_bytes=2 * 1024**3, file_size_bytes=4 * 1024**3, disk_bytes=8 * 1024**3, inodes=1_000_000, pids=256
)
"""Of the sandbox that unpacks a work tree; sessions on it have their own."""

_IDENTITY = b"[user]\n\tname = SWE-bench\n\temail = setup@swebench.config\n"
"""Git's configuration of the agent's user: the identity that the benchmark's images have, so that it can commit."""
_MOUNT = "/setup"
_ARCHIVE = "data.tar.gz"
_LOG_TAIL = 1500


class NotPrepared(InvalidRequest, LookupError):
    """The store has no start of an instance; the message names the command that makes one."""


class NotValidated(InvalidRequest):
    """An instance was prepared, but its validation was not run or did not pass."""


class NoVerdictHere(EnvironmentFailed):
    """The tests of an instance give no verdict on states of ours either.

    Args:
        message: Description of what happened. Sessions may get it: it has no word of the tests.
        log: Log of the run, for the person who prepares the instance alone.
    """

    def __init__(self, message: str, /, *, log: str = "") -> None:
        super().__init__(message)
        self.log = log


def problems_of(error: ErrataError) -> list[str]:
    """Return what an error says to the person who prepares an instance: its message, and the end of its log if any."""
    return [error.message, *end_of_log(getattr(error, "log", ""))]


def end_of_log(log: str) -> list[str]:
    """Return a line about the end of a log, safe to print; none for an empty log."""
    end = log.strip()[-_LOG_TAIL:]
    return [f"the end of its log: {printable_lines(end)}"] if end else []


@dataclass(frozen=True, slots=True)
class Validation:
    """What one validation of one instance found.

    Args:
        digest: Digest of the instance, its recipe and its build: the validation holds for exactly these.
        problems: Reasons why the instance must not be served; empty if there are none.
        flaky: Tests of PASS_TO_PASS that did not always pass after the gold patch: they are left out, by name.
        runs: Number of test runs with each patch, the empty and the gold one.
        before: Number of tests of FAIL_TO_PASS and PASS_TO_PASS that passed with the empty patch, and number of all.
        after: Numbers of the same form as `before`, with the gold patch.
        seconds: Median time of a test run with the gold patch, in seconds; 0 if there was none.
        rules: Version of the rules that judged.
        validator: `VALIDATOR` of the program that ran it.
    """

    digest: str
    problems: tuple[str, ...] = ()
    flaky: tuple[str, ...] = ()
    runs: int = 0
    before: Mapping[str, Sequence[int]] = field(default_factory=dict)
    after: Mapping[str, Sequence[int]] = field(default_factory=dict)
    seconds: float = 0.0
    rules: str = ""
    validator: int = VALIDATOR

    @property
    def passed(self) -> bool:
        """Nothing was found that forbids to serve the instance."""
        return not self.problems and self.validator == VALIDATOR


@dataclass(frozen=True, slots=True)
class Build:
    """What was built for an instance.

    Args:
        instance_id: Id of the instance.
        key: Digest of all that the build was made of; see `build_key`.
        base: Name or id of its base tree; id of its image.
        python: Path of the tests' interpreter inside the sandbox.
        env: Variables of the first shell and of the tests.
        tree: sha256 of the archive of the work tree, hexadecimal.
        system: sha256 of the archive of what the installation put elsewhere, owned by root; empty for nothing.
        source: Description of where the code came from.
        interpreter: Full version of the interpreter.
        size_bytes: Size of the archives, in bytes.
        seconds: Duration of the build, in seconds.
        created: Time of the build, in seconds since 1970.
        validation: The last validation; None before the first.
        notes: Notes for the person who prepared the instance.
    """

    instance_id: str
    key: str
    base: str
    python: str
    env: Mapping[str, str]
    tree: str
    system: str = ""
    source: str = ""
    interpreter: str = ""
    size_bytes: int = 0
    seconds: float = 0.0
    created: int = 0
    validation: Validation | None = None
    notes: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return it as JSON's types."""
        values = {name: getattr(self, name) for name in Build.__slots__}
        values["env"] = dict(self.env)
        values["validation"] = None if self.validation is None else asdict(self.validation)
        return json.loads(json.dumps(values))  # type: ignore[no-any-return]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Build:
        """Return what `record` gave.

        Raises:
            TypeError: It is of another version.
        """
        values = dict(record)
        found = values.get("validation")
        if found is not None:
            found = Validation(**found | {name: tuple(found[name]) for name in ("problems", "flaky")})
        values |= {"validation": found, "notes": tuple(values.get("notes", ()))}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class Prepared:
    """An instance that sessions can start on.

    Args:
        instance: The instance, without the tests that its recipe or its validation leaves out.
        recipe: The recipe of the instance.
        base: Name of the instance's base tree, for `Backend.open`.
        snapshot: The start: the repository at the base commit in ``workdir``. `Backend.restore` is O(1).
        python: Path of the tests' interpreter inside the sandbox.
        env: Variables of the first shell. A command with ``clean=True`` has to be given them.
        digest: Digest of the instance, its recipe and its build.
        validated: Whether the instance's validation passed.
        workdir: Root of the repository.
    """

    instance: Instance
    recipe: Recipe
    base: str
    snapshot: SandboxSnapshot
    python: str
    env: Mapping[str, str]
    digest: str
    validated: bool
    workdir: str = WORKDIR

    @property
    def test_command(self) -> str:
        """Shell text that runs the tests, in ``workdir`` and with ``env``."""
        return self.recipe.test_command


class Store:
    """Builds and archives in one directory. Safe for several processes.

    Args:
        directory: The store; None for the configured one. Made when something is kept.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = (directory or default_directory()).absolute()

    def find(self, instance: Instance, key: str) -> Build | None:
        """Return what was built for an instance under a key; None where that is not there whole."""
        path = self._record(instance.instance_id, key)
        try:
            build = Build.of(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError, KeyError):
            return None
        if not all(self.archive(sha).is_file() for sha in (build.tree, build.system) if sha):
            return None
        return build

    def keep(self, build: Build) -> None:
        """Write what was built, with its validation."""
        path = self._record(build.instance_id, build.key)
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        _write(path, json.dumps(build.record(), indent=1).encode() + b"\n")

    def used(self, build: Build) -> None:
        """Note that a build is in use: what was not for the longest time is dropped first."""
        try:
            os.utime(self._record(build.instance_id, build.key))
        except OSError:  # another user's store is read only
            return

    def builds(self) -> Iterator[Build]:
        """Yield every build, the one that was not used for the longest time first."""
        paths = [path for path in self.directory.glob("instances/*/*.json") if not path.name.startswith(".")]
        for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path)):
            try:
                yield Build.of(json.loads(path.read_text("utf-8")))
            except (OSError, ValueError, TypeError, KeyError):
                continue

    def archive(self, sha256: str) -> Path:
        """Return the path of an archive; its directory holds nothing else, so that a sandbox may mount it."""
        return self.directory / "objects" / sha256 / _ARCHIVE

    def add(self, file: Path) -> tuple[str, int]:
        """Move an archive into the store; return its sha256 and size in bytes."""
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256").hexdigest()
        place = self.archive(digest)
        size = file.stat().st_size
        if place.is_file():
            file.unlink()
            return digest, size
        place.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        file.chmod(0o644)
        file.replace(place)
        return digest, size

    @property
    def packages(self) -> Path:
        """Directory of files that were fetched from the package index."""
        return self.directory / "packages"

    def make(self) -> None:
        """Make the directory of the store."""
        for path in (self.directory, self.directory / "locks", self.directory / "bases"):
            path.mkdir(mode=0o755, parents=True, exist_ok=True)

    def base_of(self, digest: str) -> str | None:
        """Return the id of the base tree that was made of something; None where none was, or it was dropped."""
        try:
            record = json.loads((self.directory / "bases" / f"{digest}.json").read_text("utf-8"))
            return str(record["id"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep_base(self, digest: str, identity: str, name: str) -> None:
        """Note which base tree was made of something."""
        self.make()
        _write(self.directory / "bases" / f"{digest}.json", json.dumps({"id": identity, "name": name}).encode() + b"\n")

    def forget_base(self, identity: str) -> None:
        """Remove the records of a base tree that was deleted."""
        for path in (self.directory / "bases").glob("*.json"):
            if self.base_of(path.stem) == identity:
                path.unlink(missing_ok=True)

    def forget(self, build: Build) -> None:
        """Remove the note of a build."""
        path = self._record(build.instance_id, build.key)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # other builds of the instance are there
            path.parent.rmdir()

    @asynccontextmanager
    async def locked(self, name: str, progress: Callable[[str], None] = lambda line: None) -> AsyncIterator[None]:
        """Hold a lock of the store: one process at a time makes something; a dead one holds none."""
        path = self.directory / "locks" / name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("another process builds the same: waiting for it")
                await asyncio.to_thread(fcntl.flock, descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _record(self, instance_id: str, key: str) -> Path:
        return self.directory / "instances" / INSTANCE.check(instance_id) / f"{key[:32]}.json"


class Catalogue:
    """Starts of prepared instances on one backend, made on first use and shared by all sessions.

    Args:
        store: The store of builds; None for the configured one.
        backend: Makes the sandboxes.
    """

    def __init__(self, store: Store | None, backend: Backend) -> None:
        self.store = store or Store()
        self.backend = backend
        self._starts: SharedBuilds[str, SandboxSnapshot] = SharedBuilds()
        self._used: dict[str, ExitStack] = {}

    async def find(
        self, instance: Instance, recipe: Recipe, *, validated: bool = True, outdated: bool = False, flaky: bool = True
    ) -> Prepared:
        """Return an instance that sessions can start on. O(1) after the first time, which unpacks its work tree.

        Args:
            instance: The instance.
            recipe: Its recipe.
            validated: Whether to refuse an instance whose validation did not pass.
            outdated: Whether to accept, despite ``validated``, what another version of the validator passed.
            flaky: Whether to leave out the tests that the instance's validation found flaky.

        Raises:
            NotPrepared: It was not prepared from this row and this recipe.
            NotValidated: Its validation was not run, or did not pass.
            SandboxFailed: The sandbox broke.
        """
        build = self.store.find(instance, build_key(instance, recipe))
        if build is None:
            raise _not_prepared(instance, recipe)
        digest = prepared_digest(instance, recipe, build)
        found = build.validation if build.validation is not None and build.validation.digest == digest else None
        refused = _why_refused(found, outdated) if validated else ""
        if refused:
            raise NotValidated(
                f"{instance.instance_id} may not be served: {refused}: run `errata swe validate --dataset FILE "
                f"{inputs(recipe)} --instance {instance.instance_id}`",
                instance_id=instance.instance_id,
            )
        self.store.used(build)
        left_out = {*recipe.exclude_pass_to_pass, *(found.flaky if found and flaky else ())}
        return Prepared(
            instance=instance.excluding(left_out),
            recipe=recipe,
            base=build.base,
            snapshot=await self._start(instance, recipe, build),
            python=build.python,
            env=MappingProxyType(dict(build.env)),
            digest=digest,
            validated=found is not None and found.passed,
        )

    async def open(
        self, instance: Instance, recipe: Recipe, *, validated: bool = True, limits: Limits | None = None
    ) -> tuple[Prepared, Sandbox]:
        """Return `find`, and a new sandbox at that start.

        A start that no journal row names may have been collected since it was made; then it is made again.

        Raises:
            NotPrepared: See `find`.
            NotValidated: See `find`.
            SandboxFailed: The sandbox broke.
        """
        prepared = await self.find(instance, recipe, validated=validated)
        try:
            return prepared, await self.backend.restore(prepared.snapshot, limits=limits)
        except SandboxFailed:
            self._starts.forget_value(prepared.snapshot)
            prepared = await self.find(instance, recipe, validated=validated)
            return prepared, await self.backend.restore(prepared.snapshot, limits=limits)

    async def _start(self, instance: Instance, recipe: Recipe, build: Build) -> SandboxSnapshot:
        if build.base not in self._used:
            # As long as this process lives: sessions mount their base tree anew for every command.
            self._used[build.base] = ExitStack()
            self._used[build.base].enter_context(using(build.base))
        try:
            return await self._starts.get(
                f"{build.key} {build.base}", lambda: start_of(self.backend, self.store, build)
            )
        except SandboxUnavailable as error:
            why = error.message
            if recipe.source.kind == "image":
                try:
                    await image_id(self.backend, recipe)
                    why = f"the name {recipe.source.name} is now that of another image than it was prepared from"
                except (SourceMissing, SandboxUnavailable) as missing:
                    why = missing.message
            raise _not_prepared(instance, recipe, f" ({why})") from error


def default_directory() -> Path:
    """Return the configured directory of prepared instances."""
    configured = os.environ.get(DIRECTORY_VARIABLE)
    return Path(configured) if configured else user_cache() / "swe"


def prepared_digest(instance: Instance, recipe: Recipe, build: Build) -> str:
    """Return the digest that a validation holds for and an episode is of: of the row, the recipe, the build, its image.

    The validator's version is no part of it, so that an episode that is open while that changes can be submitted.
    """
    image = (build.base,) if recipe.source.kind == "image" else ()
    parts = (_DIGEST_VERSION, instance.digest, recipe.digest, build.key, build.tree, build.system, *image)
    return f"sha256:{hashlib.sha256(json.dumps(parts).encode()).hexdigest()}"


async def start_of(backend: Backend, store: Store, build: Build) -> SandboxSnapshot:
    """Unpack a build in a new sandbox, and return a snapshot of it: the start of its sessions.

    The sandbox has the build's base tree, the files of its system archive (if it has one) outside the work tree, a git
    identity of the agent's user, and its work tree in ``WORKDIR``. Each call makes a new snapshot; nothing is cached.

    The sandbox is destroyed; the snapshot stays. The caller does not release it: the backend deletes its layer when
    neither a journal row nor an open sandbox needs it (`Backend.collect`), and it then has to be made again.

    Args:
        backend: Makes the sandbox; it is started if necessary.
        store: Has the archives of the build.
        build: The build.

    Raises:
        EnvironmentFailed: The archive of the work tree cannot be unpacked, or not within 600 s.
        SandboxUnavailable: The build's base tree is missing, or the backend cannot start.
        SandboxFailed: The sandbox broke.
    """
    entries = await asyncio.to_thread(_system_entries, store.archive(build.system)) if build.system else ()
    identity = Directory(HOME, owner="agent"), File(f"{HOME}/.gitconfig", _IDENTITY, 0o644, "agent")
    spec = SandboxSpec(workdir=WORKDIR, env=build.env, entries=(*entries, *identity), mtime_s=EPOCH_S, empty=True)
    await backend.start()
    sandbox = await backend.open(base=build.base, limits=START_LIMITS, spec=spec)
    try:
        result = await sandbox.run(
            f"tar -xzpf {_MOUNT}/{_ARCHIVE} -C {WORKDIR}",
            clean=True,
            mounts={_MOUNT: store.archive(build.tree).parent},
            timeout_s=600.0,
        )
        demand(result, f"{build.instance_id}: unpacking its work tree")
        return await sandbox.snapshot()
    finally:
        await sandbox.destroy()


def _why_refused(found: Validation | None, outdated: bool) -> str:
    """Return why an instance with that validation must not be served; ``""`` if it may be.

    The reasons are that it was not validated (``found`` is None), that the validation found problems (at most three
    are named), and, unless ``outdated``, that another version of the validator passed it.
    """
    if found is None:
        return "its validation was not run"
    if found.problems:
        return "; ".join(found.problems[:3])
    if found.validator != VALIDATOR and not outdated:
        return f"it was validated by version {found.validator}, this is version {VALIDATOR}"
    return ""


def _not_prepared(instance: Instance, recipe: Recipe, why: str = "") -> NotPrepared:
    return NotPrepared(
        f"{instance.instance_id} is not prepared from this row and recipe{why}: run `errata swe prepare --dataset FILE "
        f"{inputs(recipe)} --instance {instance.instance_id}`",
        instance_id=instance.instance_id,
    )


def demand(result: CommandResult, what: str) -> None:
    """Raise where a command of ours failed.

    Raises:
        EnvironmentFailed: It did.
    """
    if result.exit_code != 0:
        status = "was killed at its time limit" if result.timed_out else f"ended with {result.exit_code}"
        limit = f" (limit: {result.limit_hit})" if result.limit_hit else ""
        raise EnvironmentFailed(f"{what} {status}{limit}: {(result.stderr or result.stdout).strip()[-1500:]}")


def _system_entries(archive: Path) -> tuple[Entry, ...]:
    """Return what an archive of files outside the work tree holds; all of it belongs to root."""
    entries: list[Entry] = []
    with tarfile.open(archive) as opened:
        for member in opened:
            path = "/" + "/".join(member_path(member.name).parts)
            if member.isdir():
                entries.append(Directory(path, member.mode & 0o755))
            elif member.issym():
                entries.append(Symlink(path, member.linkname))
            elif member.isreg():
                content = opened.extractfile(member)
                assert content is not None
                entries.append(File(path, content.read(), member.mode & 0o755))
    return tuple(entries)


def _write(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".new-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
