"""``errata sandboxd``: start the broker that runs containers for servers."""

from __future__ import annotations

import argparse
import logging
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from .names import OWNER


def main(argv: Sequence[str]) -> int:
    """Run the broker until SIGTERM or SIGINT.

    Returns:
        The exit status: 0, or 1 if the docker SDK is missing, the engine's address is not a unix socket, too few open
        files are allowed, or a socket cannot be made.
    """
    options = _parser().parse_args(list(argv))
    try:
        from .engine import Policy
        from .schema import Refused
        from .service import IDLE, Service
    except ImportError as error:
        print(f"errata sandboxd: {error}: install Errata with its extra `docker` (docs/sandboxd.md)", file=sys.stderr)
        return 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if not options.engine.startswith("unix://"):
        print(f"errata sandboxd: --engine {options.engine}: only unix:///PATH is supported", file=sys.stderr)
        return 1
    owners = options.serve or [_serve("errata=/run/errata/sandboxd.sock")]
    policy = Policy(
        engine=options.engine,
        images=tuple(options.image or Policy().images),
        containers=options.containers,
        memory_bytes=options.memory_mib * 1024**2,
        pids=options.pids,
        cpus=options.cpus,
        archive_bytes=options.archive_mib * 1024**2,
        copy_out_bytes=options.copy_out_mib * 1024**2,
        spool_bytes=min(options.spool_mib * 1024**2, shutil.disk_usage(tempfile.gettempdir()).total // len(owners)),
        connections=options.connections,
    )
    if (missing := _missing_descriptors(len(owners) * (IDLE + 3 * policy.connections))) is not None:
        print(f"errata sandboxd: {missing}", file=sys.stderr)
        return 1
    try:
        services = [(Service(path, policy, owner, options.mode, options.group), path) for owner, path in owners]
    except (OSError, LookupError, ValueError, OverflowError) as error:  # a path, group or mode that cannot be
        print(f"errata sandboxd: no socket can be made: {error}: correct --serve, --group or --mode", file=sys.stderr)
        return 1
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    for service, path in services:
        threading.Thread(target=service.serve_forever, daemon=True).start()
        print(f"errata sandboxd: {service.engine.owner} on {path}, engine {policy.engine}", flush=True)
    try:
        services[0][0].engine.ping()
    except Refused as error:
        # Only a warning: the engine may start later, and until then requests get the same error.
        print(f"errata sandboxd: {error.message}", file=sys.stderr, flush=True)
    ended.wait()
    # side by side: requests of one owner do not take the time of another's
    ends = [threading.Thread(target=service.end, args=(options.grace_s,)) for service, _ in services]
    for end in ends:
        end.start()
    for end in ends:
        end.join()
    return 0


def _missing_descriptors(needed: int) -> str | None:
    """Raise the limit of open files to what all connections may need; return what to do if it cannot be.

    Args:
        needed: Number of descriptors: one for an idle connection; one for a running one, its engine's and its file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed += 64
    if hard != resource.RLIM_INFINITY and hard < needed:
        return f"{needed} open files may be needed, {hard} are allowed: raise `ulimit -n`, or lower --connections"
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="errata sandboxd",
        description="Makes container sandboxes for servers that do not have the engine's socket (docs/sandboxd.md).",
    )
    add = parser.add_argument
    add("--engine", default="unix:///var/run/docker.sock", metavar="unix:///PATH", help="the engine's socket")
    add(
        "--serve",
        action="append",
        type=_serve,
        metavar="OWNER=SOCKET",
        help="a socket for one server, with the label of its containers (default errata=/run/errata/sandboxd.sock)",
    )
    add(
        "--image",
        action="append",
        metavar="PATTERN",
        help="image names that sandboxes may be made of (default errata/*)",
    )
    add("--containers", type=int, default=64, metavar="N", help="most containers of one owner (64)")
    add("--memory-mib", type=int, default=4096, metavar="N", help="most memory of one container (4096)")
    add("--pids", type=int, default=4096, metavar="N", help="most processes of one container (4096)")
    add("--cpus", type=float, default=0.0, metavar="N", help="processors of one container; 0: no bound")
    add("--archive-mib", type=int, default=1024, metavar="N", help="largest archive copied into a container (1024)")
    add("--copy-out-mib", type=int, default=256, metavar="N", help="largest archive copied out of a container (256)")
    add(
        "--spool-mib",
        type=int,
        default=1024,
        metavar="N",
        help="most archives held for one owner, in TMPDIR (1024; at most its share of that file system)",
    )
    add("--connections", type=int, default=128, metavar="N", help="most running requests of one owner (128)")
    add(
        "--grace-s",
        type=float,
        default=30.0,
        metavar="N",
        help="seconds that running requests have after SIGTERM, before their programs are killed (30)",
    )
    add(
        "--mode",
        type=lambda text: int(text, 8),
        default=0o660,
        metavar="OCTAL",
        help="permission bits of the sockets (660)",
    )
    add("--group", default="", metavar="GROUP", help="group of the sockets")
    return parser


def _serve(text: str) -> tuple[str, Path]:
    """Parse OWNER=SOCKET."""
    owner, separator, path = text.partition("=")
    if not separator or not re.fullmatch(OWNER, owner) or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not OWNER=SOCKET (owner: a-z, 0-9, _ . -)")
    return owner, Path(path)
