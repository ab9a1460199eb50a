"""The checks of ``errata doctor``. Each returns a `Finding`: a verdict, the disadvantage, and what to change.

`examine` has a `Machine` try the operations that a server needs, and makes a `Finding` of each result. The sandbox
backend adds its own checks. With a verdict ``missing`` ``errata serve terminal`` would not work; with ``worse`` it
works with a disadvantage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from errata_os import descriptors

from ...sandbox.base import BackendConfig, BackendType, Finding
from .probes import Machine

_SESSIONS = 10_000
"""Default limit of sessions of ``errata serve``; each uses a file descriptor."""
_SLOW_FSYNC_S = 0.01
_LOW_INODES = 100_000
_MIB = 1024**2


def examine(machine: Machine, backend: BackendType, config: BackendConfig, *, port: int = 8000) -> Iterator[Finding]:
    """Make the checks one by one and yield a result for each.

    Args:
        machine: The measurements.
        backend: The sandbox backend that the server would use.
        config: The backend's configuration.
        port: The port on which the server would listen.
    """
    yield _python(machine)
    yield _openenv(machine)
    data_dir = _data_dir(machine, backend)
    yield data_dir
    usable = data_dir.verdict != "missing"
    yield from backend.checks(config, usable=usable)
    yield _open_files(machine, backend)
    if usable:
        yield _space(machine)
        yield _fsync(machine)
    yield _port(machine, port)


def summary(found: Sequence[Finding]) -> str:
    """Return one line that says whether ``errata serve`` would work here, and which findings prevent it."""
    missing = [finding for finding in found if finding.verdict == "missing"]
    if not missing:
        return "`errata serve terminal` would work here"
    names = ", ".join(finding.name for finding in missing)
    if all(finding.of_sandboxes for finding in missing):
        return f"`errata serve terminal` would not work here ({names}); environments without sandboxes would"
    return f"`errata serve` would not work here ({names})"


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


def _data_dir(machine: Machine, backend: BackendType) -> Finding:
    failure, kind = machine.try_data_dir(), machine.file_system()
    if failure:
        fix = "name a directory that this user can write with --data-dir or ERRATA_DATA_DIR"
        return Finding("data directory", "missing", failure, "no journal, no layers: no server", fix)
    if kind in backend.unfit_file_systems:
        return Finding(
            "data directory",
            "missing",
            f"{machine.data_dir} is on {kind}: {backend.unfit_file_systems[kind]}",
            "no sandboxes",
            "mount a volume (ext4, xfs, btrfs, tmpfs) and name it with --data-dir",
            of_sandboxes=True,
        )
    if kind == "tmpfs":
        costs = "journal and layers end with the machine, and take its memory"
        return Finding("data directory", "worse", f"{machine.data_dir} on tmpfs", costs, "name a disk with --data-dir")
    return Finding("data directory", "ok", f"{machine.data_dir} on {kind}")


def _open_files(machine: Machine, backend: BackendType) -> Finding:
    bound, wanted = machine.open_files(), descriptors.enough(_SESSIONS, backend.descriptors)
    fix = descriptors.RAISE.format(wanted)
    if bound < descriptors.least(backend.descriptors):
        return Finding("open files", "missing", f"{bound} descriptors", "no server with sandboxes starts", fix)
    budget = descriptors.budget(bound, backend.descriptors)
    if bound >= wanted:
        return Finding("open files", "ok", f"{bound}: room for {budget.connections} connections")
    costs = f"room for {budget.connections} connections"
    if budget.commands < backend.descriptors:
        costs += f", and {budget.commands * 100 // backend.descriptors} % of the commands that could run at once"
    return Finding("open files", "worse", f"{bound} descriptors", costs, fix)


def _space(machine: Machine) -> Finding:
    space = machine.space()
    says = (
        f"{space.free_bytes // _MIB} MiB and {space.free_inodes} inodes free; {space.floor_bytes // _MIB} MiB are kept"
    )
    fix = "free space, or name a larger disk with --data-dir"
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
