"""Arbitrary code with the broker's socket: what it can reach, and what it cannot."""

from __future__ import annotations

import base64
import io
import json
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_sandboxd.schema import VERBS

from ...sandboxd.attacker import Attacker
from .conftest import IMAGE, RunningBroker

pytestmark = pytest.mark.containers

NOWHERE = "0" * 64


@pytest.fixture
def attacker(broker: RunningBroker) -> Attacker:
    return Attacker(broker.sockets["one"])


@pytest.fixture
def neighbour(broker: RunningBroker) -> Attacker:
    return Attacker(broker.sockets["two"])


@pytest.fixture
def mine(attacker: Attacker) -> Iterator[str]:
    made = attacker.ok("create", image=IMAGE)["container"]
    attacker.ok("start", container=made)
    yield made
    attacker.call("remove", container=made)


def with_container(verb: str) -> bool:
    return "container" in VERBS[verb][0]


def arguments_of(verb: str) -> dict[str, Any]:
    return {
        "exec": {"argv": ["id"], "timeout_s": 5},
        "copy_out": {"path": "/etc/passwd", "max_bytes": 10_000},
        "commit": {"facts": {}},
    }.get(verb, {})


@pytest.mark.parametrize("verb", [verb for verb in VERBS if with_container(verb)])
def test_no_verb_reaches_a_container_of_another_owner(
    verb: str, attacker: Attacker, neighbour: Attacker, api: Any
) -> None:
    theirs = neighbour.ok("create", image=IMAGE)["container"]
    neighbour.ok("start", container=theirs)
    unlabelled = api.create_container(IMAGE, ["sleep", "1000"])["Id"]
    try:
        before = api.inspect_container(theirs)["State"]
        assert attacker.code(verb, container=theirs, **arguments_of(verb)) == "unknown"
        assert attacker.code(verb, container=unlabelled, **arguments_of(verb)) == "unknown"
        assert attacker.code(verb, container=theirs[:12], **arguments_of(verb)) == "invalid", "no prefixes, no names"
        assert api.inspect_container(theirs)["State"] == before
        assert theirs not in {row["container"] for row in attacker.ok("list")["containers"]}
    finally:
        neighbour.ok("remove", container=theirs)
        api.remove_container(unlabelled, force=True)


def test_a_layer_of_another_owner_is_neither_used_nor_removed(
    attacker: Attacker, neighbour: Attacker, api: Any
) -> None:
    theirs = neighbour.ok("create", image=IMAGE)["container"]
    layer = neighbour.ok("commit", container=theirs, facts={"base": "x"})["image"]
    try:
        assert attacker.code("create", image=layer) == "image_missing"
        assert attacker.code("remove_image", image=layer) == "unknown"
        assert attacker.code("remove_image", image=api.inspect_image(IMAGE)["Id"]) == "unknown", "nor the base image"
        assert layer not in {row["image"] for row in attacker.ok("list")["layers"]}
        assert neighbour.ok("create", image=layer)["image"] == layer
    finally:
        for row in neighbour.ok("list")["containers"]:
            neighbour.ok("remove", container=row["container"])
        neighbour.ok("remove_image", image=layer)


def test_a_label_cannot_be_forged_by_a_commit(attacker: Attacker, neighbour: Attacker, mine: str, api: Any) -> None:
    assert attacker.code("commit", container=mine, facts={"errata.sandbox": "two"}) == "invalid"
    layer = attacker.ok("commit", container=mine, facts={"errata_sandbox": "two"})["image"]
    assert neighbour.code("remove_image", image=layer) == "unknown"
    attacker.ok("remove_image", image=layer)


@pytest.mark.parametrize(
    "wish",
    [
        {"privileged": True},
        {"binds": ["/:/host"]},
        {"volumes": {"/": "/host"}},
        {"mounts": [{"Source": "/", "Target": "/host", "Type": "bind"}]},
        {"devices": ["/dev/kmsg"]},
        {"cap_add": ["SYS_ADMIN"]},
        {"network_mode": "host"},
        {"pid_mode": "host"},
        {"security_opt": ["seccomp=unconfined"]},
        {"user": "0"},
        {"host_config": {"Privileged": True}},
        {"labels": {"errata.sandbox": "two"}},
        {"tmpfs": {"/proc/sys": 8192}},
        {"tmpfs": {"/x,exec,suid": 8192}},
        {"tmpfs": {"/a/../proc": 8192}},
        {"tmpfs": {"/./proc": 8192}},
        {"tmpfs": ["/x"]},
        {"memory_bytes": 2**45},
        {"memory_bytes": -1},
        {"memory_bytes": True},
        {"pids": 10**6},
        {"pids": 0.5},
        {"read_only": "no"},
    ],
)
def test_create_takes_no_wish_beyond_its_schema(attacker: Attacker, wish: dict[str, Any]) -> None:
    before = attacker.ok("list")["containers"]
    assert attacker.code("create", image=IMAGE, **wish) == "invalid"
    assert attacker.ok("list")["containers"] == before


@pytest.mark.parametrize(
    "image", ["debian", "errata/../debian", "library/errata/base", "docker.io/errata/base:default", "errata/none:x"]
)
def test_only_listed_images_that_are_there_are_used(attacker: Attacker, image: str) -> None:
    assert attacker.code("create", image=image) in ("image_refused", "image_missing", "invalid")


def test_what_a_container_is_has_no_power(attacker: Attacker, mine: str, api: Any) -> None:
    found = api.inspect_container(mine)
    host = found["HostConfig"]
    assert (host["Privileged"], host["CapDrop"], host["CapAdd"]) == (False, ["ALL"], None)
    assert (host["NetworkMode"], host["IpcMode"], host["PidMode"], host["UsernsMode"]) == ("none", "private", "", "")
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert (host["Binds"], host["Devices"] or [], host.get("Mounts")) == (None, [], None)
    assert host["Memory"] == host["MemorySwap"] > 0
    assert host["PidsLimit"] > 0
    assert host["CpuShares"] == 512
    assert found["Mounts"] == []
    shown = attacker.shell(mine, "grep -E '^(Cap|NoNew|Seccomp:)' /proc/self/status; id -u", root=True).split()
    values = dict(zip(shown[:-1:2], shown[1::2], strict=False))
    assert {name: int(value, 16) for name, value in values.items() if name.startswith("Cap")} == dict.fromkeys(
        ("CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"), 0
    )
    assert (values["NoNewPrivs:"], values["Seccomp:"], shown[-1]) == ("1", "2", "0")


def test_root_in_a_container_cannot_get_out(attacker: Attacker, mine: str) -> None:
    tries = (
        "mount -t tmpfs t /mnt",
        "mount --bind /etc /mnt",
        "mknod /dev/sda b 8 0",
        "unshare -m true",
        "unshare -Ur true",
        "nsenter -t 1 -m true",
        "chroot / true",
        "chown 64000 /etc/passwd",
        "su agent -c true",
        "echo 1 > /proc/sys/kernel/panic",
        "echo x > /sys/fs/cgroup/cgroup.procs",
        "echo x > /proc/sysrq-trigger",
        "cat /proc/kcore",
        "dmesg",
        "date -s 2001-01-01",
        "hostname other",
        "ip link add x type dummy",
        "ls /run/docker.sock /var/run/docker.sock",
        "echo > /dev/tcp/1.1.1.1/80",
    )
    text = "\n".join(f"( {one} ) >/dev/null 2>&1 && echo 'WORKED {one}'" for one in tries) + "\ntrue"
    assert attacker.shell(mine, text, root=True) == ""


def tar(*members: tuple[str, dict[str, Any]], data: bytes = b"") -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w", format=tarfile.PAX_FORMAT) as out:
        for name, fields in members:
            member = tarfile.TarInfo(name)
            member.size = len(data) if fields.get("type", tarfile.REGTYPE) == tarfile.REGTYPE else 0
            for key, value in fields.items():
                setattr(member, key, value)
            out.addfile(member, io.BytesIO(data))
    return written.getvalue()


@pytest.mark.parametrize(
    "members",
    [
        [("../../../../tmp/out", {})],
        [("/etc/absolute", {})],
        [("a/../../b", {})],
        [("dev/sda", {"type": tarfile.BLKTYPE, "devmajor": 8})],
        [("sda", {"type": tarfile.BLKTYPE, "devmajor": 8})],
        [("null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3})],
        [("hard", {"type": tarfile.LNKTYPE, "linkname": "/etc/shadow"})],
        [("bash", {"mode": 0o4755})],
        [("owned", {"uid": 1})],
        [("proc/x", {})],
        [("./proc/x", {})],
        [("././dev/x", {})],
        [("pipe", {"type": tarfile.FIFOTYPE})],
    ],
)
def test_an_archive_brings_nothing_but_plain_files(attacker: Attacker, mine: str, members: list[Any]) -> None:
    answer = attacker.call("copy_in", container=mine, data=tar(("first", {}), *members))
    assert answer.get("error", {}).get("code") == "invalid", answer
    assert attacker.shell(mine, "ls /first 2>&1").count("No such file") == 1, "all of it or nothing"


def test_an_archive_is_unpacked_inside_whatever_links_the_agent_made(
    attacker: Attacker, mine: str, tmp_path: Path
) -> None:
    attacker.shell(mine, f"ln -s ../../../../../../../..{tmp_path} /workspace/out; ln -s / /workspace/root")
    attacker.call("copy_in", container=mine, data=tar(("workspace/out/leaked", {})))
    attacker.call(
        "copy_in",
        container=mine,
        data=tar(("x", {"type": tarfile.SYMTYPE, "linkname": str(tmp_path)}), ("x/leaked", {})),
    )
    assert list(tmp_path.iterdir()) == []


def test_copies_out_are_of_the_container(attacker: Attacker, mine: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host secret")
    attacker.shell(mine, f"ln -s {tmp_path}/secret /workspace/s; ln -s /proc/1/environ /workspace/p")
    for path in ("/workspace/s", f"/../../..{tmp_path}/secret", "/proc/1/environ", str(tmp_path)):
        assert b"host secret" not in attacker.call("copy_out", container=mine, path=path, max_bytes=10**6)["output"]
    assert attacker.code("copy_out", container=mine, path="/etc", max_bytes=1000) == "too_large"


@pytest.mark.parametrize(
    "sent",
    [
        b"\n",
        b"[]\n",
        b"{}\n",
        b"not json\n",
        b'{"do": "build", "path": "."}\n',
        b'{"do": "pull", "image": "x"}\n',
        b'{"do": "put"}\n',
        b'{"do": "get"}\n',
        b'{"do": "exec_start"}\n',
        b'{"do": "_own"}\n',
        b'{"do": "__init__"}\n',
        b'{"do": "policy"}\n',
        b'{"do": ["ping"]}\n',
        b'{"do": "ping", "timeout": 5}\n',
        b'{"do": "list", "all": true}\n',
        b'{"do": "remove"}\n',
        b'{"do": "inspect", "container": {"$ne": 1}}\n',
        b'{"do": "start", "container": "' + b"0" * 63 + b'/"}\n',
        b'{"do": "remove_image", "image": "errata/base:default"}\n',
        b"x" * (3 * 1024**2),
        b"\xff\xfe\n",
    ],
)
def test_a_request_that_is_none_is_refused_and_the_broker_goes_on(attacker: Attacker, sent: bytes) -> None:
    try:
        lines = attacker.raw(sent)
        assert [line["error"]["code"] for line in lines] in (["invalid"], ["too_large"])
    except ConnectionError:  # a flood was not read to its end
        assert len(sent) > 1024**2
    assert "engine" in attacker.ok("ping")


def test_an_unknown_container_is_unknown(attacker: Attacker) -> None:
    assert attacker.code("start", container=NOWHERE) == "unknown"


def test_a_program_ends_with_its_deadline_and_all_it_started(attacker: Attacker, mine: str) -> None:
    text = "trap '' TERM HUP INT; (setsid sleep 1000 &) ; (sleep 1000 &) ; while :; do sleep 1; done"
    answer = attacker.ok("exec", container=mine, argv=["/bin/bash", "-c", text], timeout_s=1)
    assert answer == {"ended": "timeout", "exit": None}
    assert attacker.shell(mine, "cat /proc/[0-9]*/comm").count("sleep") == 0


def test_a_program_ends_with_its_caller(attacker: Attacker, mine: str, broker: RunningBroker, eventually: Any) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(str(broker.sockets["one"]))
        request = {"do": "exec", "container": mine, "argv": ["sleep", "7777"], "timeout_s": 600}
        link.sendall(json.dumps(request).encode() + b'\n{"end": true}\n')
        eventually(lambda: "7777" in attacker.shell(mine, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"))

    def gone() -> bool:
        show = ["/bin/bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
        answer = attacker.call("exec", container=mine, argv=show, timeout_s=20)  # refused while it is restarted
        return answer.get("ok", {}).get("ended") == "exit" and b"7777" not in answer["output"]

    eventually(gone)


def test_output_beyond_its_budget_ends_a_program(attacker: Attacker, mine: str) -> None:
    answer = attacker.call("exec", container=mine, argv=["yes"], timeout_s=60, output_bytes=2 * 1024**2)
    assert answer["ok"] == {"ended": "output", "exit": None}
    assert len(answer["output"]) < 4 * 1024**2


def test_streams_are_apart_and_input_of_any_size_arrives(attacker: Attacker, mine: str) -> None:
    data = bytes(range(256)) * 1200
    answer = attacker.call("exec", container=mine, argv=["cat"], timeout_s=30, data=data)
    assert answer["output"] == data
    lines = attacker.raw(
        json.dumps(
            {"do": "exec", "container": mine, "argv": ["bash", "-c", "echo o; echo e >&2"], "timeout_s": 9}
        ).encode()
        + b'\n{"end": true}\n'
    )
    streams = {name: base64.b64decode(text) for line in lines[:-1] for name, text in line.items()}
    assert streams == {"stdout": b"o\n", "stderr": b"e\n"}


def test_containers_of_an_owner_are_bounded(engine: str, base_image: str, api: Any, tmp_path: Path) -> None:
    from .conftest import remove_all, start_broker

    made = start_broker(engine, tmp_path, "few", options=("--containers", "2"))
    few = Attacker(made.sockets["few"])
    try:
        answers: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: answers.append(few.call("create", image=IMAGE))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert sum("ok" in answer for answer in answers) == 2, answers
        assert few.code("create", image=IMAGE) == "conflict"
    finally:
        remove_all(api, made.owners["few"])
        made.stop()


def test_idle_and_slow_connections_do_not_hold_up_others(attacker: Attacker, broker: RunningBroker) -> None:
    held = []
    for _ in range(100):
        link = socket.socket(socket.AF_UNIX)
        link.connect(str(broker.sockets["one"]))
        link.sendall(b'{"do": "pi')
        held.append(link)
    try:
        results: list[Any] = []
        threads = [threading.Thread(target=lambda: results.append(attacker.ok("ping"))) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(results) == 10
    finally:
        for link in held:
            link.close()


def test_clients_that_read_nothing_do_not_occupy_the_engine(
    attacker: Attacker, broker: RunningBroker, mine: str
) -> None:
    attacker.shell(mine, "head -c 4000000 /dev/urandom > /workspace/big")
    links = []
    request = {"do": "copy_out", "container": mine, "path": "/workspace/big", "max_bytes": 10**8}
    try:
        for _ in range(12):  # more than calls of the engine at once
            link = socket.socket(socket.AF_UNIX)
            links.append(link)
            link.connect(str(broker.sockets["one"]))
            link.sendall(json.dumps(request).encode() + b"\n")
            assert link.recv(1, socket.MSG_PEEK), "it has begun to answer"
        attacker.ok("ping")  # else it is refused after ten seconds; they are let go after a minute
    finally:
        for link in links:
            link.close()


def test_a_program_whose_output_nobody_reads_ends_with_its_deadline(
    attacker: Attacker, broker: RunningBroker, mine: str, eventually: Any
) -> None:
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(60)
        link.connect(str(broker.sockets["one"]))
        request = {"do": "exec", "container": mine, "argv": ["yes", "8888"], "timeout_s": 2}
        link.sendall(json.dumps(request).encode() + b'\n{"end": true}\n')

        def gone() -> bool:
            show = ["/bin/bash", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"]
            answer = attacker.call("exec", container=mine, argv=show, timeout_s=20)
            return answer.get("ok", {}).get("ended") == "exit" and b"yes 8888" not in answer["output"]

        time.sleep(2.5)  # its deadline
        eventually(gone)
        lines = [json.loads(line) for line in link.makefile("rb")]
    assert lines[-1] == {"ok": {"ended": "timeout", "exit": None}}, "every line is whole"


def test_the_socket_is_for_its_group_only(broker: RunningBroker) -> None:
    assert broker.sockets["one"].stat().st_mode & 0o777 == 0o660


def test_a_read_only_root_takes_writes_where_it_was_given_room(attacker: Attacker) -> None:
    made = attacker.ok("create", image=IMAGE, read_only=True, tmpfs={"/workspace": 8 * 1024**2})["container"]
    try:
        attacker.ok("start", container=made)
        text = "cd /workspace; echo x > /tmp/x; touch /usr/y; head -c 20M /dev/zero > z; stat -c %s z"
        answer = attacker.call("exec", container=made, argv=["/bin/bash", "-c", text], timeout_s=20)
        assert answer["output"].count(b"Read-only file system") == 2
        assert b"No space left on device" in answer["output"]
        assert b"8388608" in answer["output"]
    finally:
        attacker.ok("remove", container=made)
