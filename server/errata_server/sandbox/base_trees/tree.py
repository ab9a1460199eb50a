"""Finds base trees, and builds one with debootstrap: ``errata base build``.

A directory of bases looks like this:

    bases/default                link to the tree that new sessions start on
    bases/default-1f0c9a…/       one tree; its name is its id
        base.json                what it was made of
        root/                    the files

An id is made of the tree's content, and a tree is never changed after it was published: a rebuild makes another one
beside it and moves the link. So a session that started on the old tree goes on with it, and `find_base` also takes an
id for a name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errata_protocol.errors import SandboxUnavailable

from ..files import as_owner
from ..files.walk import remove_tree
from ..host.privileges import check_privileges
from ..launcher import PROGRAMS
from .agent_modes import close_tree
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
"""Free space a build needs: the tree before trimming and the downloaded packages."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SMOKE = (
    "python3 -c 'import sqlite3, ssl, pytest' && git --version && jq --version && rg --version && sqlite3 -version"
    " && printf 'int main(void){return 0;}' > /tmp/smoke.c && gcc -o /tmp/smoke /tmp/smoke.c && /tmp/smoke"
    " && rm /tmp/smoke /tmp/smoke.c"
    f" && PYTHONPATH=/{VERIFIER_DIRECTORY} python3 -c 'import pytest, ctrf.main, requests, pexpect'"
)
# Byte code by content, not by time: grading imports pytest each time, and may not write there.
_COMPILE = f"python3 -I -m compileall -q --invalidation-mode unchecked-hash /{VERIFIER_DIRECTORY}"
_log = logging.getLogger("errata.base")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class BaseTree:
    """One base tree.

    Args:
        name: What sessions ask for, e.g. ``default``.
        root: Directory that becomes ``/``; nobody may write below it.
        id: URL-safe name of exactly this tree, kept in snapshots.
        writable: Directories the agent may write in, relative to the root. Only rootless mode asks: elsewhere owners
            and modes say it.
    """

    name: str
    root: Path
    id: str
    writable: tuple[str, ...] = (*AGENT_DIRECTORIES, *WORLD_WRITABLE)


def base_directories() -> list[Path]:
    """Return the directories that are searched for trees, the one that `build_base` writes to first."""
    configured = os.environ.get("ERRATA_BASE_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directories = [Path(cache) / "errata" / "bases", Path("/var/lib/errata/bases")]
    return [Path(configured), *directories] if configured else directories


def find_base(name: str = "default", named: Mapping[str, Path] | None = None) -> BaseTree:
    """Return the tree that ``name`` means on this machine.

    Args:
        name: A name, or the id of a tree.
        named: Trees the operator named (``errata serve --base NAME=PATH``), before all others. A path is a tree of
            ours (with ``base.json``) or any directory that can be ``/``. The id of the latter is a fingerprint of its
            path, its list of installed packages and the names, types, modes and sizes in its top two levels: reading
            it all would take seconds at each start. Do not change such a tree while sessions on it are kept.

    Raises:
        SandboxUnavailable: There is none, or the named directory is not a system.
    """
    if named is not None and name in named:
        path = named[name]
        return _read(name, path) if (path / "base.json").is_file() else _plain(name, path)
    check_name(name)
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
    """Refuse a tree that rootless mode cannot use: an overlay can write only over files of the user who mounts it.

    Raises:
        SandboxUnavailable: It is another user's; the message has the command that copies it.
    """
    owner = base.root.stat().st_uid
    if owner != os.geteuid():
        source = base.root.parent if (base.root.parent / "base.json").is_file() else base.root
        raise SandboxUnavailable(
            f"base tree {base.name!r} at {base.root} belongs to uid {owner}, and the rootless sandbox needs one of uid "
            f"{os.geteuid()}: run `errata base import {source} {base.name}`"
        )


def check_name(name: str) -> None:
    """Refuse a name that could be a path.

    Raises:
        SandboxUnavailable: It is one.
    """
    if not _NAME.fullmatch(name):
        raise SandboxUnavailable(f"{name!r} cannot be the name of a base tree: use letters, digits, '.', '_' and '-'")


def needs_build(name: str = "default", directory: Path | None = None) -> bool:
    """Return whether `build_base` would build: there is no tree, or today's recipe is another one."""
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
    """Make the tree with debootstrap, or return the one there is when it comes from today's recipe.

    Safe to call from several processes at once and to kill at any moment: a tree appears whole or not at all.

    Args:
        name: Name of the tree.
        directory: Directory of bases; default: the first of `base_directories`.
        mirror: Package archive; default: the host's own.
        suite: Release codename; default: the host's own. A tree of another suite is built anew.
        system: Root directory of an installed Debian or Ubuntu with `PACKAGES`, instead of debootstrap's. It is moved,
            or copied from another file system. For builds that may not mount, such as an image's.
        progress: Called with one line for each stage.

    Raises:
        SandboxUnavailable: Something is missing or failed: one line that says what to install or do.
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
            "built: make room or set ERRATA_BASE_DIR to another disk"
        )
    with locked(directory / f".{name}.lock", progress):
        current = _current(name, directory, suite)  # another process may have built it meanwhile
        return current or _build(name, directory, source, system, progress)


def _build(name: str, directory: Path, source: AptSource, system: Path | None, progress: Progress) -> BaseTree:
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
        progress("trimming and closing the tree")
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
            close_tree(root)
            record["owner"] = os.geteuid()
        (work / "base.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(packages)
    seconds = time.monotonic() - started
    progress(f"base tree {identity}: {size // 1024**2} MiB in {seconds:.0f} s at {directory / identity}")
    _log.info("built base tree %s in %.1f s, %d bytes", identity, seconds, size)
    return BaseTree(name, directory / identity / "root", identity)


@contextmanager
def publish(name: str, directory: Path) -> Iterator[Path]:
    """Give a directory to make a tree in; at the end it gets the id in its ``base.json`` and the link of ``name``.

    The lock of the name is held. A tree appears whole or not at all.
    """
    work = directory / f".{name}.building"
    _discard(work)  # of a build that was killed
    work.mkdir(mode=0o755)
    try:
        yield work
        record = read_record(work)
        assert record is not None
        identity: str = record["id"]
        final = directory / identity
        if final.exists():
            (work / "base.json").replace(final / "base.json")
            _discard(work)  # the same tree, byte for byte; sessions may be using it
        else:
            os.sync()  # the link below must not survive a power loss that the files did not
            work.rename(final)
        link = directory / f".{name}.link"
        link.unlink(missing_ok=True)
        link.symlink_to(identity)
        link.rename(directory / name)
    except BaseException:
        _discard(work)
        raise


def _check_machine() -> None:
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
    # Own namespaces: what debootstrap mounts and starts vanishes with it, even when it or we are killed, so that
    # removing an unfinished tree can never reach through a mount into the host.
    command = ["setpriv", "--pdeathsig", "KILL", "--"]
    if os.geteuid() == 0:
        command += ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--"]
    command += [*_fake_root(), "debootstrap"]
    command += ["--variant=minbase", "--merged-usr", "--force-check-gpg", f"--cache-dir={packages}"]
    command += [f"--components={','.join(source.components)}", f"--include={','.join(PACKAGES)}"]
    if source.keyring is not None:
        command.append(f"--keyring={source.keyring}")
    command += [source.suite, str(root), source.mirror]
    environment = {  # package scripts run on this: nothing else of the host's environment
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/",
        "LC_ALL": "C",
        "DEBIAN_FRONTEND": "noninteractive",
        **proxy_environment(),
    }
    if os.geteuid() != 0:
        environment["container"] = "lxc"  # then debootstrap binds the host's device nodes, as it would have to here
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
        with process:  # reads to the end of the output: then nothing that writes into the tree is left
            process.communicate()
    if code != 0:
        complaints = [line for line in tail if line.startswith(("E: ", "W: "))] or list(tail)[-3:]
        raise SandboxUnavailable(_explain("; ".join(complaints[-3:]), source))


def _fake_root() -> list[str]:
    """Return what goes before a command that wants to be root: nothing where it is."""
    if os.geteuid() == 0:
        return []
    return [sys.executable, "-I", "-S", str(PROGRAMS / "fake_root.py")]


def _prepare(root: Path) -> None:
    if os.geteuid() == 0:
        return prepare(root)
    # It gives files to the agent, whom this user cannot name.
    program = (
        "import sys, pathlib; sys.path[:] = sys.argv[2:]; from errata_server.sandbox.base_trees.recipe import prepare; "
    )
    program += "prepare(pathlib.Path(sys.argv[1]))"
    command = [*_fake_root(), sys.executable, "-c", program, str(root), *sys.path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if result.returncode != 0:
        last = result.stderr.strip().rpartition("\n")[2]
        raise SandboxUnavailable(f"the new tree could not be made a base tree ({last}): report this")
    return None


def _explain(complaint: str, source: AptSource) -> str:
    said = f"debootstrap could not make {source.suite} from {source.mirror} ({complaint})"
    if "No such script" in complaint:
        return f"{said}: this debootstrap is older than the release, name another with --suite"
    if "keyring" in complaint or "signature" in complaint.lower():
        return f"{said}: run `apt-get install debian-archive-keyring` (Ubuntu: ubuntu-keyring), then this again"
    if "nodev" in complaint or "noexec" in complaint:
        return f"{said}: set ERRATA_BASE_DIR to a disk mounted without nodev and noexec"
    return f"{said}: check the network, http_proxy, or name a mirror with --mirror, then run this again"


def _adopt(system: Path, root: Path) -> str:
    """Make ``system`` the new tree's root; return its release codename."""
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
    """Run the tools once as the agent: a tree that does not work is never published."""
    _inside(root, _SMOKE, f"{AGENT_UID}:{AGENT_UID}", mounts)


def _inside(root: Path, script: str, user: str, mounts: bool) -> None:
    """Run shell text with the new tree as its root; where mounts are allowed, in namespaces of its own."""
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
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    finally:
        for path in devices:
            path.unlink(missing_ok=True)
    if result.returncode != 0:
        raise SandboxUnavailable(f"the new base tree does not work ({result.stderr.strip()[-300:]}): report this")


def _current(name: str, directory: Path, suite: str | None = None) -> BaseTree | None:
    record = read_record(directory / name)
    if record is None or record["recipe"] != recipe_digest() or (suite is not None and suite != record["suite"]):
        return None
    return _read(name, directory / name)


def read_record(path: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads((path / "base.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise SandboxUnavailable(f"{path}/base.json cannot be read ({error}): remove {path} and build it") from error
    return record


def _read(name: str, path: Path) -> BaseTree:
    record = read_record(path)
    assert record is not None
    root = _system(name, path.resolve() / "root")
    if "writable" in record:
        return BaseTree(name, root, record["id"], tuple(record["writable"]))
    return BaseTree(name, root, record["id"])


def _plain(name: str, path: Path) -> BaseTree:
    root = _system(name, path.absolute())
    return BaseTree(name, root, _fingerprint(root))


def _system(name: str, root: Path) -> Path:
    shell = root / "bin" / "bash"
    # lexists, because an absolute link inside the tree (bin -> /usr/bin) does not resolve from outside
    if not (os.path.lexists(shell) or os.path.lexists(root / "usr/bin/bash")):
        raise SandboxUnavailable(f"base tree {name!r} at {root} has no /bin/bash: it must be a whole system tree")
    return root


def _fingerprint(root: Path) -> str:
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
    with path.open("w", encoding="ascii") as file:  # released by the kernel whatever becomes of us
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("another process builds this tree: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _discard(work: Path) -> None:
    as_owner.call(remove_tree, work)  # an ordinary user may not delete below directories of modes that forbid it
