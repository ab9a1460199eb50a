"""The namespace backend's checks for ``errata doctor``: what was found, the disadvantage, and what to change."""

from __future__ import annotations

import re
from collections.abc import Iterator

from errata_protocol.errors import ErrataError

from ..base import Finding
from .probes import Probes, SandboxTrial

_KERNEL_NEEDED, _KERNEL_MAPPED = (5, 11), (5, 19)
_SLOW_COMMAND_S = 0.25
_NO_SANDBOX = "no sandboxes, so no terminal environment; environments that run no commands do without"


def examine(probes: Probes, *, usable: bool) -> Iterator[Finding]:
    """Make the checks one by one and yield a result for each.

    Args:
        probes: The tests of this machine.
        usable: Files can be written in the backend's directory. If False, no sandbox is tried.
    """
    yield _kernel(probes)
    yield _user_namespaces(probes)
    yield _seccomp(probes)
    yield _base(probes)
    if not usable:
        says = "not tried: a sandbox needs the data directory"
        yield Finding("sandbox", "missing", says, _NO_SANDBOX, "fix the data directory first", of_sandboxes=True)
        return
    trial = probes.try_sandbox()
    yield _sandbox(trial)
    yield from _details(trial)


def _kernel(probes: Probes) -> Finding:
    release = probes.kernel()
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


def _user_namespaces(probes: Probes) -> Finding:
    failure = probes.try_user_namespace()
    needed = probes.uid() != 0
    if not failure:
        says = "work" if needed else "work; root does not depend on them"
        return Finding("user namespaces", "ok", says)
    if needed:
        return Finding(
            "user namespaces",
            "missing",
            failure,
            "no sandboxes for an ordinary user",
            probes.why_refused(),
            of_sandboxes=True,
        )
    costs = "commands share one uid of the host, and a server without root has no sandboxes"
    return Finding("user namespaces", "worse", failure, costs, probes.why_refused())


def _seccomp(probes: Probes) -> Finding:
    failure = probes.try_seccomp()
    if failure:
        fix = "use a kernel with CONFIG_SECCOMP_FILTER"
        return Finding("seccomp", "missing", failure, "no sandboxes", fix, of_sandboxes=True)
    return Finding("seccomp", "ok", "the system call filter is loaded and refuses")


def _base(probes: Probes) -> Finding:
    try:
        return Finding("base tree", "ok", probes.base())
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
    """Yield what a working sandbox can enforce; nothing if the trial failed."""
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


def _split(message: str, costs: str) -> tuple[str, str, str]:
    """Return ``says``, ``costs`` and ``fix`` of a `Finding`; the fix is what follows the last ``: `` of a message."""
    says, colon, fix = message.rpartition(": ")
    return (says, costs, fix) if colon else (message, costs, "see docs/sandbox.md")
