"""docker/engine.sh leaves the machine's network as it was: played in namespaces, beside no other engine."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import ROOT

SCRIPT = """
set -eu
mount -t tmpfs none /run
ip link set lo up
state() {
    for tables in iptables ip6tables; do
        for table in filter nat; do "$tables" -t "$table" -S; done
    done
    cat /proc/sys/net/ipv4/ip_forward
    ip -o link | sed 's/@.*//' | cut -d: -f2
}
iptables -N MINE
iptables -A FORWARD -j MINE
iptables -t nat -N DOCKER-OF-MINE
state >"$1/before"
"""

ENGINES = {
    "one": "{engine} up {root}/a; {state} during; {engine} down {root}/a; {state} after",
    "one that was killed": (
        "{engine} up {root}/a; {state} during; kill -KILL $(cat {root}/a/pid); sleep 1; {engine} down {root}/a; "
        "{state} after"
    ),
    "two, the first ends first": (
        "{engine} up {root}/a; {engine} up {root}/b; {state} during; {engine} down {root}/a; {state} between; "
        "DOCKER_HOST=unix://{root}/b/sock docker version >/dev/null; {engine} down {root}/b; {state} after"
    ),
}


@pytest.fixture
def short() -> Iterator[Path]:  # a socket's path has room for 107 characters
    path = Path("/tmp") / "errata-engine-test"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.mark.parametrize("engines", ENGINES)
def test_the_packet_filter_and_forwarding_are_restored(engines: str, short: Path) -> None:
    steps = ENGINES[engines].format(engine=f"{ROOT}/docker/engine.sh", root=short, state="keep")
    script = SCRIPT + f'keep() {{ state >"{short}/$1"; }}\n' + steps
    done = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "bash", "-c", script, "bash", str(short)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    read = {path.name: path.read_text() for path in short.iterdir() if path.is_file()}
    assert "-N DOCKER\n" in read["during"] and "-N DOCKER\n" not in read["before"]
    assert read["after"] == read["before"]
    if "between" in read:
        assert "-N DOCKER\n" in read["between"], "the other engine needs them"
