"""What works on this machine, and what each missing piece costs: ``errata doctor``.

`examine` asks a `Machine`, which tries things rather than reads about them, and turns each answer into a `Finding`.
What is ``missing`` keeps ``errata serve terminal`` from working; what is ``worse`` costs something, and says what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from errata_protocol.errors import ErrataError

from .probes import Machine, SandboxTrial

Verdict = Literal["ok", "worse", "missing"]

_KERNEL_NEEDED, _KERNEL_MAPPED = (5, 11), (5, 19)
_SESSIONS = 10_000
"""What ``errata serve`` admits unless told otherwise; each holds a descriptor."""
_OTHER_DESCRIPTORS = 256 + 6 * 400
"""The server's own, and those of 400 commands at once."""
_SLOW_FSYNC_S = 0.01
_SLOW_COMMAND_S = 0.25
_LOW_INODES = 100_000
_NO_SANDBOX = "no sandboxes, so no terminal environment; environments that run no commands do without"
_MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Args:
        name: What was tried.
        verdict: ``ok``; ``worse``: it works and costs something; ``missing``: ``errata serve terminal`` would not work.
        says: What was found.
        costs: What is lost, empty when nothing is.
        fix: The command or step that changes it, empty when there is nothing to change.
        of_sandboxes: Only environments that run commands in sandboxes need it.
    """

    name: str
    verdict: Verdict
    says: str
    costs: str = ""
    fix: str = ""
    of_sandboxes: bool = False


def examine(machine: Machine, *, port: int = 8000) -> Iterator[Finding]:
    """Yield one finding for each check, as soon as it was made.

    Args:
        machine: What to ask.
        port: Where the server would listen.
    """
    yield _kernel(machine)
    yield _python(machine)
    yield _openenv(machine)
    yield _user_namespaces(machine)
    yield _seccomp(machine)
    usable = _data_dir(machine)
    yield usable
    yield _base(machine)
    trial = SandboxTrial()
    if usable.verdict == "missing":
        says = "not tried: a sandbox needs the data directory"
        yield Finding("sandbox", "missing", says, _NO_SANDBOX, "mend the data directory first", of_sandboxes=True)
    else:
        trial = machine.try_sandbox()
        yield _sandbox(trial)
    yield from _details(trial)
    yield _open_files(machine)
    if usable.verdict != "missing":
        yield _space(machine)
        yield _fsync(machine)
    yield _port(machine, port)


def summary(found: Sequence[Finding]) -> str:
    """Return what a server on this machine could serve, in one line."""
    missing = [finding for finding in found if finding.verdict == "missing"]
    if not missing:
        return "`errata serve terminal` would work here"
    names = ", ".join(finding.name for finding in missing)
    if all(finding.of_sandboxes for finding in missing):
        return f"`errata serve terminal` would not work here ({names}); environments without sandboxes would"
    return f"`errata serve` would not work here ({names})"


def _kernel(machine: Machine) -> Finding:
    release = machine.kernel()
    found = re.match(r"(\d+)\.(\d+)", release)
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version < _KERNEL_NEEDED:
        return Finding(
            "kernel",
            "missing",
            f"Linux {release}, too old",
            "no sandboxes",
            "use a machine with Linux 5.11 or later",
            of_sandboxes=True,
        )
    if version < _KERNEL_MAPPED:
        costs = "no uid of its own for each command: sandboxes share inotify instances and pipe buffers"
        return Finding("kernel", "worse", f"Linux {release}", costs, "use Linux 5.19 or later")
    return Finding("kernel", "ok", f"Linux {release}")


def _python(machine: Machine) -> Finding:
    version = machine.python()
    text = ".".join(map(str, version))
    if (3, 11) <= version[:2] < (3, 14):
        return Finding("python", "ok", f"Python {text}")
    return Finding("python", "missing", f"Python {text}", "Errata is not tested with it", "use Python 3.11 to 3.13")


def _openenv(machine: Machine) -> Finding:
    found = machine.distribution("openenv")
    other = machine.distribution("openenv-core")
    if found is None:
        return Finding("openenv", "missing", "not installed", "no server", "pip install 'openenv>=0.10,<0.11'")
    if other is not None and other != found:
        return Finding(
            "openenv",
            "missing",
            f"openenv {found} and openenv-core {other} are both installed, and both bring the module openenv",
            "which one is imported is a matter of chance",
            "pip uninstall -y openenv openenv-core && pip install 'openenv>=0.10,<0.11'",
        )
    if not found.startswith("0.10."):
        return Finding(
            "openenv",
            "missing",
            f"openenv {found}",
            "the server is a drop-in for 0.10",
            "pip install 'openenv>=0.10,<0.11'",
        )
    return Finding("openenv", "ok", f"openenv {found}" + (" with openenv-core of the same version" if other else ""))


def _user_namespaces(machine: Machine) -> Finding:
    failure = machine.try_user_namespace()
    needed = machine.uid() != 0
    if not failure:
        says = "work" if needed else "work; root does not depend on them"
        return Finding("user namespaces", "ok", says)
    if needed:
        return Finding(
            "user namespaces",
            "missing",
            failure,
            "no sandboxes for an ordinary user",
            machine.why_refused(),
            of_sandboxes=True,
        )
    costs = "commands share one uid of the host, and a server without root has no sandboxes"
    return Finding("user namespaces", "worse", failure, costs, machine.why_refused())


def _seccomp(machine: Machine) -> Finding:
    failure = machine.try_seccomp()
    if failure:
        fix = "use a kernel with CONFIG_SECCOMP_FILTER"
        return Finding("seccomp", "missing", failure, "no sandboxes", fix, of_sandboxes=True)
    return Finding("seccomp", "ok", "the system call filter is loaded and refuses")


def _data_dir(machine: Machine) -> Finding:
    failure, kind = machine.try_data_dir(), machine.file_system()
    if failure:
        fix = "name a directory that this user can write with --data-dir or ERRATA_DATA_DIR"
        return Finding("data directory", "missing", failure, "no journal, no layers: no server", fix)
    if kind == "overlay":
        return Finding(
            "data directory",
            "missing",
            f"{machine.data_dir} is on an overlay, on which no other overlay can write",
            "no sandboxes",
            "mount a volume (ext4, xfs, btrfs, tmpfs) and name it with --data-dir",
            of_sandboxes=True,
        )
    if kind == "tmpfs":
        costs = "journal and layers end with the machine, and take its memory"
        return Finding("data directory", "worse", f"{machine.data_dir} on tmpfs", costs, "name a disk with --data-dir")
    return Finding("data directory", "ok", f"{machine.data_dir} on {kind}")


def _base(machine: Machine) -> Finding:
    try:
        return Finding("base tree", "ok", machine.base())
    except ErrataError as error:
        return Finding("base tree", "missing", *_split(error.message, _NO_SANDBOX), of_sandboxes=True)


def _sandbox(trial: SandboxTrial) -> Finding:
    if trial.info is None:
        return Finding("sandbox", "missing", *_split(trial.failure, _NO_SANDBOX), of_sandboxes=True)
    says = f"{trial.info.mode} mode; `true` takes {trial.seconds * 1000:.0f} ms (median of {trial.count})"
    if trial.seconds > _SLOW_COMMAND_S:
        costs = f"at most {1 / trial.seconds:.0f} commands/s in one session"
        return Finding(
            "sandbox", "worse", says, costs, "give the server an idle core and the data directory its own disk"
        )
    return Finding("sandbox", "ok", says)


def _details(trial: SandboxTrial) -> Iterator[Finding]:
    """What a sandbox that runs can hold; nothing when none does."""
    if trial.info is None:
        return
    held = [name for name in ("memory_bytes", "pids") if name in trial.info.enforces]
    kind = f"v{trial.info.cgroups}" if trial.info.cgroups else "none that can be written"
    says = f"{kind}; held: {', '.join(held) or 'neither memory nor pids'}"
    if trial.info.cgroups:
        yield Finding("cgroups", "ok", says)
    else:
        fix = "systemd-run --user --scope -p Delegate=yes errata serve ..."
        if trial.info.mode == "root":
            fix = "mount /sys/fs/cgroup writable, or systemd-run --scope -p Delegate=yes errata serve ..."
        costs = "a command can use up the machine's memory" + ("" if "pids" in held else " and its processes")
        yield Finding("cgroups", "worse", says, costs, fix)
    if trial.info.mode == "rootless":
        yield Finding(
            "id-mapped mounts",
            "worse",
            "only root has them",
            "commands share inotify instances and pipe buffers with the server's user",
            "run the server as root",
        )
    elif trial.shared_uid:
        yield Finding(
            "id-mapped mounts",
            "worse",
            trial.shared_uid,
            "commands share one uid of the host, its inotify instances and pipe buffers",
            "use Linux 5.19 or later, with the data directory and the base tree on ext4, xfs, btrfs or tmpfs",
        )
    else:
        yield Finding("id-mapped mounts", "ok", "each running command has a uid of the host to itself")


def _open_files(machine: Machine) -> Finding:
    bound = machine.open_files()
    sessions = max(0, bound - _OTHER_DESCRIPTORS)
    if sessions >= _SESSIONS:
        return Finding("open files", "ok", f"{bound}: room for {_SESSIONS} sessions")
    return Finding(
        "open files",
        "worse",
        f"{bound} descriptors",
        f"room for {sessions} connected sessions beside 400 commands at once" if sessions else "few commands at once",
        f"ulimit -n {_SESSIONS + _OTHER_DESCRIPTORS} (systemd: LimitNOFILE=)",
    )


def _space(machine: Machine) -> Finding:
    space = machine.space()
    says = (
        f"{space.free_bytes // _MIB} MiB and {space.free_inodes} inodes free; {space.floor_bytes // _MIB} MiB are kept"
    )
    fix = "make room, or name a larger disk with --data-dir"
    if space.free_bytes <= space.floor_bytes or (space.has_inodes and space.free_inodes < 1000):
        return Finding("disk", "missing", says, "no request runs below the floor", fix)
    if space.free_bytes < 4 * space.floor_bytes or (space.has_inodes and space.free_inodes < _LOW_INODES):
        return Finding("disk", "worse", says, "a few long sessions fill it, and then no request runs", fix)
    return Finding("disk", "ok", says)


def _fsync(machine: Machine) -> Finding:
    median_s = machine.fsync_s()
    rate = 1 / median_s if median_s > 0 else float("inf")
    says = f"{median_s * 1000:.2f} ms (median of 20)"
    means = f"at most {rate:.0f} steps/s in one session; sessions that step together share a sync"
    if median_s > _SLOW_FSYNC_S:
        fix = "put the data directory on a faster disk, or --no-fsync (a power loss then takes the last steps)"
        return Finding("fsync", "worse", says, means, fix)
    return Finding("fsync", "ok", f"{says}: {means}")


def _port(machine: Machine, port: int) -> Finding:
    failure = machine.try_port(port)
    if failure:
        return Finding(
            "port", "missing", f"{port}: {failure}", "`errata serve` ends at once", "errata serve --port 0 ..."
        )
    return Finding("port", "ok", f"{port} is free")


def _split(message: str, costs: str) -> tuple[str, str, str]:
    """Return what a message of ours says, the cost, and its way out, which stands after the last ``: ``."""
    says, colon, fix = message.rpartition(": ")
    return (says, costs, fix) if colon else (message, costs, "see docs/sandbox.md")
