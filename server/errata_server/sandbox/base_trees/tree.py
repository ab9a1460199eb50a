"""Finds, builds and publishes base trees, with debootstrap or from an installed system: ``errata base build``.

A directory of bases looks like this:

    bases/default                symlink to the tree that new sessions use
    bases/default-1f0c9a…/       one tree; the directory's name is its id
        base.json                how it was made
        root/                    the files

An id has a hash of the tree's content, and a tree never changes after it was published: a rebuild makes another one and
changes the symlink. So a session that started on the old tree continues with it, and `find_base` accepts ids, too.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import lzma
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errata_os.input_files import FileRefused, read_file
from errata_os.user_cache import user_cache
from errata_protocol.errors import SandboxUnavailable
from errata_protocol.names import BASE, BASE_ID, InvalidName, Kind, shown

from ..files import as_owner
from ..files.walk import remove_tree
from ..host.privileges import check_privileges
from ..launcher import PROGRAMS
from .agent_modes import restrict_modes
from .apt_source import AptSource, choose_source, proxy_environment
from .recipe import (
    AGENT_DIRECTORIES,
    AGENT_UID,
    PACKAGES,
    VERIFIER_DIRECTORY,
    WORLD_WRITABLE,
    content_digest,
    prepare,
    recipe_digest,
)
from .verifier_packages import install_verifier_packages

__all__ = ["AGENT_UID", "BaseTree", "base_directories", "build_base", "find_base", "needs_build"]

NEEDED_BYTES = 1536 * 1024**2
"""Free space that a build needs, for the untrimmed tree and the downloaded packages."""

ARCHIVE_ERRORS = (
    OSError,
    tarfile.TarError,
    EOFError,
    ValueError,  # also names that cannot be encoded or are none
    OverflowError,
    RecursionError,
    KeyError,
    zlib.error,
    lzma.LZMAError,
)
"""What reading and unpacking an archive that somebody else made can raise."""
RECORD_BYTES = 1024**2
"""Largest ``base.json``."""
_SMOKE = (
    "python3 -c 'import sqlite3, ssl, pytest' && git --version && jq --version && rg --version && sqlite3 -version"
    " && printf 'int main(void){return 0;}' > /tmp/smoke.c && gcc -o /tmp/smoke /tmp/smoke.c && /tmp/smoke"
    " && rm /tmp/smoke /tmp/smoke.c"
    f" && PYTHONPATH=/{VERIFIER_DIRECTORY} python3 -c 'import pytest, ctrf.main, requests, pexpect'"
)
# Byte code that is valid whatever the time stamps: grading imports pytest each time, and may not write there.
_COMPILE = f"python3 -I -m compileall -q --invalidation-mode unchecked-hash /{VERIFIER_DIRECTORY}"
_STEP_TIMEOUT_S = 120.0
"""Time after which a program that a build runs in the new tree or on it is killed."""
_log = logging.getLogger("errata.base")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BaseTree:
    """One base tree.

    Args:
        name: The name that sessions use, e.g. ``default``.
        root: Directory that becomes ``/``; its files never change.
        id: URL-safe name of exactly this tree, which snapshots contain.
        writable: Directories that the agent may write in, relative to the root. Used in rootless mode only; otherwise
            owners and modes decide.
    """

    name: str
    root: Path
    id: str
    writable: tuple[str, ...] = (*AGENT_DIRECTORIES, *WORLD_WRITABLE)


def base_directories() -> list[Path]:
    """Return the directories to search for trees; `build_base` writes to the first one.

    They are ``ERRATA_BASE_DIR``, the user's cache, and ``/var/lib/errata/bases``, without what is not set or not there.
    """
    configured = os.environ.get("ERRATA_BASE_DIR")
    directories = [Path(configured)] if configured else []
    try:
        directories.append(user_cache() / "bases")
    except SandboxUnavailable:
        pass  # a user without a home directory has no trees there
    return [*directories, Path("/var/lib/errata/bases")]


def find_base(name: str = "default", named: Mapping[str, Path] | None = None) -> BaseTree:
    """Return the tree with a name or id on this machine.

    Args:
        name: A name, or the id of a tree.
        named: Directories that the operator named (``errata serve --base NAME=PATH``), which are searched first. A path
            is a base tree (with ``base.json``) or any directory that can be ``/``. The id of the latter is a hash of
            its path, its list of installed packages and the names, types, modes and sizes in its top two levels,
            because reading all files would take seconds at each start. Do not change such a tree while sessions on it
            are kept.

    Raises:
        SandboxUnavailable: There is none, it cannot be read, or the named directory is not a system tree.
    """
    if named is not None and name in named:
        path = named[name]
        return _read(name, path) if (path / "base.json").is_file() else _plain(name, path)
    check_name(name, BASE_ID)
    for candidate in [path for path in (named or {}).values() if (path / "base.json").is_file()]:
        tree = _read(name, candidate)
        if tree.id == name:  # restored from a snapshot
            return tree
    for candidate in (named or {}).values():
        if candidate.is_dir() and _fingerprint(candidate) == name:
            return _plain(name, candidate)
    directories = base_directories()
    for directory in directories:
        try:
            (directory / name / "base.json").stat()
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise SandboxUnavailable(
                f"base tree {name!r} in {directory} cannot be read by uid {os.geteuid()}: as its owner run "
                f"`tar -C {directory}/{name}/ -cf base.tar .`, then as this user `errata base import base.tar`"
            ) from error
        return _read(name, directory / name)
    searched = ", ".join(str(directory) for directory in directories)
    raise SandboxUnavailable(
        f"no base tree {name!r} in {searched}: run `errata base build`, copy one with `errata base import TREE`, or "
        f"name one with --base {name}=PATH"
    )


def check_owner(base: BaseTree) -> None:
    """Check that rootless mode can use a tree: this user has to own it, because overlayfs copies up own files only.

    Raises:
        SandboxUnavailable: Another user owns it; the message has the command that copies it.
    """
    owner = base.root.stat().st_uid
    if owner != os.geteuid():
        source = base.root.parent if (base.root.parent / "base.json").is_file() else base.root
        raise SandboxUnavailable(
            f"base tree {base.name!r} at {base.root} belongs to uid {owner}, and the rootless sandbox needs one of uid "
            f"{os.geteuid()}: run `errata base import {source} {base.name}`"
        )


def check_name(name: str, kind: Kind = BASE) -> None:
    """Check that a string can be the name of a tree, or its id with the kind `BASE_ID`, and so is not a path.

    Raises:
        SandboxUnavailable: It has other characters than letters, digits, ``.``, ``_`` and ``-``, or is too long.
    """
    try:
        kind.check(name)
    except InvalidName as error:
        raise SandboxUnavailable(str(error)) from None


def needs_build(name: str = "default", directory: Path | None = None) -> bool:
    """Return whether `build_base` would build: there is no tree of this name, or it was made by another recipe."""
    return _current(name, directory or base_directories()[0]) is None


def build_base(
    name: str = "default",
    *,
    directory: Path | None = None,
    mirror: str | None = None,
    suite: str | None = None,
    system: Path | None = None,
    progress: Progress = lambda line: None,
) -> BaseTree:
    """Build a tree with debootstrap, or return the existing one if it was made by the current recipe.

    Several processes may call it at once, and it may be killed at any time: a tree appears complete or not at all.

    Args:
        name: Name of the tree.
        directory: Directory of bases; default: the first of `base_directories`.
        mirror: Package archive; default: the host's own.
        suite: Release codename; default: the host's own. An existing tree of another suite is built again.
        system: Root directory of an installed Debian or Ubuntu with `PACKAGES`, to use instead of debootstrap. It is
            moved, or copied from another file system. For builds that may not mount, such as that of an image.
        progress: Called with one line for each stage.

    Raises:
        SandboxUnavailable: A tool or space is missing, or a step failed; the message, one line, says what to do.
    """
    check_name(name)
    directory = (directory or base_directories()[0]).absolute()
    current = _current(name, directory, suite)
    if current is not None:
        return current
    if system is None:
        _check_machine()
    elif os.geteuid() != 0:
        raise SandboxUnavailable("a tree is made of an installed system by root only: run this as root")
    source = choose_source(suite=suite, mirror=mirror)
    directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < NEEDED_BYTES:
        raise SandboxUnavailable(
            f"{directory} has {free // 1024**2} MiB free, a base tree needs {NEEDED_BYTES // 1024**2} MiB while it is "
            "built: free space, or set ERRATA_BASE_DIR to another disk"
        )
    with locked(directory / f".{name}.lock", progress):
        current = _current(name, directory, suite)  # another process may have built it meanwhile
        return current or _build(name, directory, source, system, progress)


def _build(name: str, directory: Path, source: AptSource, system: Path | None, progress: Progress) -> BaseTree:
    """Build a tree and publish it under its name. The caller holds the lock of the name."""
    started = time.monotonic()
    packages = directory / ".packages"  # kept when a build fails, so that the next one does not download again
    packages.mkdir(exist_ok=True)
    is_root = os.geteuid() == 0
    with publish(name, directory) as work:
        root = work / "root"
        if system is None:
            progress(f"base tree {name}: {source.suite} from {source.mirror} (about a minute)")
            _bootstrap(root, source, packages, progress)
        else:
            progress(f"base tree {name}: {system}")
            suite = _adopt(system, root)
        progress("installing the packages of verifiers")
        _add_verifier_packages(root, mounts=system is None)
        progress("trimming the tree and removing privileges")
        _prepare(root)
        _smoke(root, mounts=system is None)
        digest = content_digest(root)
        identity = f"{name}-{digest[:16]}"
        size = sum(path.lstat().st_blocks * 512 for path in root.rglob("*"))
        record = {
            "format": 1,
            "id": identity,
            "digest": f"sha256:{digest}",
            "recipe": recipe_digest(),
            "suite": source.suite if system is None else suite,
            "architecture": platform.machine(),
            "created": int(time.time()),
            "size_bytes": size,
        }
        if not is_root:
            restrict_modes(root)
            record["owner"] = os.geteuid()
        (work / "base.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(packages)
    seconds = time.monotonic() - started
    progress(f"base tree {identity}: {size // 1024**2} MiB in {seconds:.0f} s at {directory / identity}")
    _log.info("built base tree %s in %.1f s, %d bytes", identity, seconds, size)
    return BaseTree(name, directory / identity / "root", identity)


@contextmanager
def publish(name: str, directory: Path) -> Iterator[Path]:
    """Yield a directory to make a tree in; then rename it to the id in its ``base.json`` and point ``name`` to it.

    A tree appears complete or not at all: an exception deletes the directory. If a tree of this id exists, it stays and
    only its ``base.json`` is replaced. The caller holds the lock of the name.

    Raises:
        SandboxUnavailable: The name is the id of a tree, or the id that of a name.
    """
    if (directory / name).is_dir() and not (directory / name).is_symlink():
        raise SandboxUnavailable(f"{name!r} is the id of a base tree in {directory}: give another name")
    work = directory / f".{name}.building"
    _discard(work)  # of a build that was killed
    work.mkdir(mode=0o755)
    try:
        yield work
        record = read_record(work)
        assert record is not None
        identity: str = record["id"]
        final = directory / identity
        if identity == name or final.is_symlink():
            raise SandboxUnavailable(f"the id {identity!r} is a name of base trees in {directory}: it needs another id")
        if final.exists():
            known = read_record(final) or {}
            if known.get("content", record["digest"]) not in (record["digest"], record.get("content")):
                raise SandboxUnavailable(f"{final} was imported and has other files than its id says: remove it")
            (work / "base.json").replace(final / "base.json")
            _discard(work)  # the existing tree has the same content, and sessions may be using it
        else:
            os.sync()  # after a power loss the link must not exist without the files
            work.rename(final)
        link = directory / f".{name}.link"
        link.unlink(missing_ok=True)
        link.symlink_to(identity)
        link.rename(directory / name)
    except BaseException:
        _discard(work)
        raise


def _check_machine() -> None:
    """Raise SandboxUnavailable if a tool or privilege for a build is missing."""
    tools = {
        "debootstrap": "debootstrap",
        "unshare": "util-linux",
        "setpriv": "util-linux",
        "wget": "wget",
        "gpgv": "gpgv",
    }
    path = "/usr/local/sbin:/usr/sbin:/sbin:" + os.environ.get("PATH", "")
    missing = sorted({package for tool, package in tools.items() if shutil.which(tool, path=path) is None})
    if missing:
        sudo = "" if os.geteuid() == 0 else "sudo "
        raise SandboxUnavailable(f"a tool is missing: run `{sudo}apt-get install {' '.join(missing)}`, then this again")
    check_privileges()


def _bootstrap(root: Path, source: AptSource, packages: Path, progress: Progress) -> None:
    """Run debootstrap.

    Args:
        root: Directory to make.
        source: Package archive.
        packages: Cache for downloaded packages.
        progress: Called every 50 packages.

    Raises:
        SandboxUnavailable: It failed; the message has its last errors and what to do.
    """
    # In namespaces of its own, so that the mounts and processes of debootstrap end with it, even if it or this process
    # is killed: removing an unfinished tree must not reach through a mount into the host.
    command = ["setpriv", "--pdeathsig", "KILL", "--"]
    if os.geteuid() == 0:
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
    command += [*_fake_root(), "debootstrap"]
    command += ["--variant=minbase", "--merged-usr", "--force-check-gpg", f"--cache-dir={packages}"]
    command += [f"--components={','.join(source.components)}", f"--include={','.join(PACKAGES)}"]
    if source.keyring is not None:
        command.append(f"--keyring={source.keyring}")
    command += [source.suite, str(root), source.mirror]
    environment = {  # package scripts get no other variables of the host
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/",
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
        **proxy_environment(),
    }
    if os.geteuid() != 0:
        # Makes debootstrap bind-mount the host's device nodes, because this user cannot make any.
        environment["container"] = "lxc"
    tail: deque[str] = deque(maxlen=200)
    counts: dict[str, int] = {}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
        umask=0o022,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            verb = re.match(r"I: (Retrieving|Extracting|Unpacking|Configuring) ", line)
            if verb:
                counts[verb[1]] = counts.get(verb[1], 0) + 1
                if counts[verb[1]] % 50 == 1:
                    progress(f"{verb[1].lower()} packages ({counts[verb[1]]})")
        code = process.wait()
    finally:
        process.kill()
        with process:  # at the end of the output no process is left that writes into the tree
            process.communicate()
    if code != 0:
        complaints = [line for line in tail if line.startswith(("E: ", "W: "))] or list(tail)[-3:]
        raise SandboxUnavailable(_explain("; ".join(complaints[-3:]), source))


def _fake_root() -> list[str]:
    """Return the command prefix that runs a program as if by root; empty if this process is root."""
    if os.geteuid() == 0:
        return []
    return [sys.executable, "-I", "-S", str(PROGRAMS / "fake_root.py")]


def _prepare(root: Path) -> None:
    """Call `recipe.prepare`, in a process that runs as if by root if this one does not.

    Raises:
        SandboxUnavailable: That process failed, or took more than `_STEP_TIMEOUT_S`.
    """
    if os.geteuid() == 0:
        return prepare(root)
    # It changes owners to the agent's uid, which this user may not.
    program = (
        "import sys, pathlib; sys.path[:] = sys.argv[2:]; from errata_server.sandbox.base_trees.recipe import prepare; "
    )
    program += "prepare(pathlib.Path(sys.argv[1]))"
    command = [*_fake_root(), sys.executable, "-c", program, str(root), *sys.path]
    result = _run_step(command)
    if result.returncode != 0:
        last = result.stderr.strip().rpartition("\n")[2]
        raise SandboxUnavailable(f"the new tree could not be made a base tree ({last}): report this")
    return None


def _run_step(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of a build and return its result, whatever its exit status.

    Args:
        command: The program and its arguments.
        environment: Its environment; None for that of this process.

    Raises:
        SandboxUnavailable: It took more than `_STEP_TIMEOUT_S`, and was killed.
    """
    try:
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_STEP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxUnavailable(
            f"a step of the new base tree's build took more than {_STEP_TIMEOUT_S:g} s and was killed: run this again "
            "when the machine is less busy"
        ) from error


def _explain(complaint: str, source: AptSource) -> str:
    """Return the message for a failed debootstrap, with what to change."""
    message = f"debootstrap could not make {source.suite} from {source.mirror} ({complaint})"
    if "No such script" in complaint:
        return f"{message}: this debootstrap is older than the release, name another with --suite"
    if "keyring" in complaint or "signature" in complaint.lower():
        return f"{message}: run `apt-get install debian-archive-keyring` (Ubuntu: ubuntu-keyring), then this again"
    if "nodev" in complaint or "noexec" in complaint:
        return f"{message}: set ERRATA_BASE_DIR to a disk mounted without nodev and noexec"
    return f"{message}: check the network, http_proxy, or name a mirror with --mirror, then run this again"


def _adopt(system: Path, root: Path) -> str:
    """Move a system to the new tree's root, and return its release codename.

    Raises:
        SandboxUnavailable: It is no Debian or Ubuntu, or cannot be moved.
    """
    release = system / "usr/lib/os-release"
    if not (system / "usr/bin/bash").is_file() or not release.is_file():
        raise SandboxUnavailable(f"{system} is not the root directory of an installed Debian or Ubuntu")
    codename = re.search(r"^VERSION_CODENAME=(\S+)$", release.read_text("utf-8"), re.MULTILINE)
    done = subprocess.run(["mv", "-T", str(system), str(root)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SandboxUnavailable(f"{system} could not be moved ({done.stderr.strip()[-300:]})")
    return codename[1] if codename else "unknown"


def _add_verifier_packages(root: Path, mounts: bool) -> None:
    install_verifier_packages(root)
    _inside(root, _COMPILE, "0:0", mounts)


def _smoke(root: Path, mounts: bool) -> None:
    """Run the tools as the agent, so that a tree that does not work is not published."""
    _inside(root, _SMOKE, f"{AGENT_UID}:{AGENT_UID}", mounts)


def _inside(root: Path, script: str, user: str, mounts: bool) -> None:
    """Run a shell script in a chroot of the new tree, to finish or check the tree.

    Args:
        root: Directory of the tree.
        script: Text for ``bash -c``.
        user: ``uid:gid`` to run as.
        mounts: Run in new mount, PID, network and IPC namespaces, with the host's ``/dev``. Otherwise use a plain
            chroot, with ``/dev/null`` and ``/dev/urandom`` made for the run.

    Raises:
        SandboxUnavailable: The script's exit status is not 0, or it took more than `_STEP_TIMEOUT_S`.
    """
    enter = f'mount --rbind /dev "$0/dev" && exec chroot --userspec={user} "$0" /bin/bash -c "$1"'
    command = [*_fake_root(), "unshare", "--mount", "--pid", "--net", "--ipc", "--fork", "--kill-child", "--"]
    command += ["/bin/sh", "-c", enter, str(root), script]
    devices = {} if mounts else {root / "dev/null": (1, 3), root / "dev/urandom": (1, 9)}
    if not mounts:
        command = ["chroot", f"--userspec={user}", str(root), "/bin/bash", "-c", script]
    environment = {"PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/home/agent", "LC_ALL": "C.UTF-8"}
    try:
        for path, numbers in devices.items():
            path.unlink(missing_ok=True)
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(*numbers))
            path.chmod(0o666)
        result = _run_step(command, environment)
    finally:
        for path in devices:
            path.unlink(missing_ok=True)
    if result.returncode != 0:
        raise SandboxUnavailable(f"the new base tree does not work ({result.stderr.strip()[-300:]}): report this")


def _current(name: str, directory: Path, suite: str | None = None) -> BaseTree | None:
    """Return the tree of a name if it was made by the current recipe and, if given, from this suite."""
    record = read_record(directory / name)
    if record is None or record["recipe"] != recipe_digest() or (suite is not None and suite != record["suite"]):
        return None
    return _read(name, directory / name)


def read_record(path: Path) -> dict[str, Any] | None:
    """Return the ``base.json`` of a tree's directory, None if there is none.

    Raises:
        SandboxUnavailable: It cannot be read, or has something else than the record of a tree.
    """
    file = path / "base.json"
    try:
        return parse_record(read_file(file, RECORD_BYTES, follow=False))
    except FileNotFoundError:
        return None
    except FileRefused as error:
        raise SandboxUnavailable(f"{error.message}; remove {path} and build it") from error
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SandboxUnavailable(f"{file} cannot be read ({why}): remove {path} and build it") from error


def parse_record(data: bytes) -> dict[str, Any]:
    """Return the record of a tree, the content of a ``base.json``.

    Raises:
        ValueError: It is not an object of JSON, is larger than `RECORD_BYTES`, has an id that is none, or a field of
            another type.
    """
    if len(data) > RECORD_BYTES:
        raise ValueError(f"it has more than {RECORD_BYTES} bytes")
    try:
        record = json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict):
        raise ValueError("it is not a JSON object")
    BASE_ID.check(record.get("id"))
    for name in ("digest", "recipe", "suite", "architecture"):
        if not isinstance(record.get(name, ""), str):
            raise ValueError(f"{name} is not text")
    writable = record.get("writable", [])
    if not isinstance(writable, list):
        raise ValueError("writable is not a list")
    for path in writable:
        if not isinstance(path, str) or "\0" in path or path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"writable has {shown(path)}, which is no path below the tree")
    return record


def _read(name: str, path: Path) -> BaseTree:
    """Return the tree in a directory with ``base.json``; raise SandboxUnavailable if it has no /bin/bash."""
    record = read_record(path)
    assert record is not None
    root = _system(name, path.resolve() / "root")
    if "writable" in record:
        return BaseTree(name, root, record["id"], tuple(record["writable"]))
    return BaseTree(name, root, record["id"])


def _plain(name: str, path: Path) -> BaseTree:
    """Return the tree for a directory without ``base.json``; raise SandboxUnavailable if it has no /bin/bash."""
    root = _system(name, path.absolute())
    return BaseTree(name, root, _fingerprint(root))


def _system(name: str, root: Path) -> Path:
    """Return ``root`` if it has /bin/bash, else raise SandboxUnavailable."""
    shell = root / "bin" / "bash"
    # lexists, because an absolute link inside the tree (bin -> /usr/bin) does not resolve from outside
    if not (os.path.lexists(shell) or os.path.lexists(root / "usr/bin/bash")):
        raise SandboxUnavailable(f"base tree {name!r} at {root} has no /bin/bash: it must be a whole system tree")
    return root


def _fingerprint(root: Path) -> str:
    """Return the id of a tree without ``base.json``; see `find_base`."""
    total = hashlib.sha256(os.fsencode(root.absolute()) + b"\0")
    status = root / "var/lib/dpkg/status"
    total.update(status.read_bytes() if status.is_file() and not status.is_symlink() else b"")
    for path in sorted([*root.glob("*"), *root.glob("*/*")]):
        entry = path.lstat()
        size = entry.st_size if path.is_file() else 0
        total.update(os.fsencode(path.relative_to(root)) + b"\0%o %d\0" % (entry.st_mode, size))
    return f"tree-{total.hexdigest()[:16]}"


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for it; calls ``progress`` with a message if it has to wait."""
    with path.open("w", encoding="ascii") as file:  # the kernel releases the lock when this process ends
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process builds this tree: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(work: Path) -> None:
    as_owner.call(remove_tree, work)  # modes may deny an ordinary user the deletion of own files
