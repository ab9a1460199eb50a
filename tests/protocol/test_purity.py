"""The protocol does no I/O: a sealed interpreter imports all of it and uses it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hangs import HANGS_S

SEALED = Path(__file__).with_name("sealed_interpreter.py")

USE = r'''
import json
from errata_protocol import (
    CODES, Capabilities, ErrorMarkers, Snapshot, SnapshotRef, StateAt,
    canonical, default_agent_text, digest, encode_payload, error_from_wire, semantic_digest, splice,
)
from errata_protocol.detect import detect
from errata_protocol.mux import ClientProtocol, EncodedReply, FindSession, RunRequest, ServerProtocol, Stored, schemas
from errata_protocol.replay import EpisodePage, ForkReply, ForkRequest, observation_of

TRACEBACK = """Traceback (most recent call last):
  File "/workspace/shop/cart.py", line 12, in total
    return sum(prices) / count
           ~~~~~~~~~~~~^~~~~~~
ZeroDivisionError: division by zero
"""
PYTEST = """F                                                                        [100%]
=================================== FAILURES ===================================
__________________________________ test_total __________________________________
    def test_total():
>       assert total([]) == 0
E       assert 1 == 0
tests/test_cart.py:9: AssertionError
=========================== short test summary info ============================
FAILED tests/test_cart.py::test_total - assert 1 == 0
1 failed in 0.02s
"""
found = [
    detect("ls /nowhere", 2, "", "ls: cannot access '/nowhere': No such file or directory\n"),
    detect("frobnicate --now", 127, "", "bash: line 1: frobnicate: command not found\n", cwd="/workspace"),
    detect("python3 shop/cart.py", 1, "", TRACEBACK),
    detect("python3 -m pytest -q", 1, PYTEST, ""),
    detect("gcc -o a a.c", 1, "", "a.c: In function 'main':\na.c:3:5: error: unknown type name 'itn'\n"),
    detect("if true; then", 2, "", "bash: -c: line 2: syntax error: unexpected end of file\n"),
    detect("sleep 100", None, "", "", timed_out=True),
    detect("curl http://example.com", 6, "", "curl: (6) Could not resolve host: example.com\n"),
    detect("python3 grow.py", 137, "", "Killed\n", limit_hit="memory"),
    detect("git commit -m x", 1, "nothing to commit, working tree clean\n", ""),
    detect("echo ok", 0, "ok\n" * 50_000, ""),
]
assert any(d.error_kind for d in found) and not all(d.error_kind for d in found)

class Observation(ErrorMarkers):
    metadata: dict = {}
    stdout: str = ""

for detection in found:
    marked = Observation(stdout="x").with_detection(detection).with_site_t(3)
    payload = encode_payload({"observation": marked.model_dump(mode="json"), "reward": float("nan"), "done": False})
    assert digest(payload).startswith("sha256:")
    semantic_digest(payload, ("stdout",))
    canonical(json.loads(payload))
    splice({"type": "observation"}, payload)
    default_agent_text(observation_of(json.loads(payload)))
Capabilities.model_validate(Capabilities(environment="terminal").model_dump()).offers("fork")
for code in CODES:
    error_from_wire({"message": "m", "code": code}).to_wire()
Snapshot(b"{}", (SnapshotRef("layer", "l-1"),))
StateAt("e", 0, "reset", b"{}", digest(b"{}"))
ForkRequest(t=0, request_id="r")
EpisodePage(episodes=[]).model_dump_json()

client, server = ClientProtocol(), ServerProtocol()
connection = server.connect()
client.connected(0.0)
session = client.open("sid-of-some-random-bits", "key-of-some-random-bits")
client.request(session, "step", b'{"a":1}')
effects = [effect for frame in client.data_to_send() for effect in server.receive(connection, frame, 0.0)]
for effect in effects:
    if isinstance(effect, FindSession):
        effects += server.found(effect, Stored(), 0.0)
    elif isinstance(effect, RunRequest):
        effects += server.completed(effect, EncodedReply("observation", b"{}", "e-1", 0), 0.0)
assert len([event for frame in connection.data_to_send() for event in client.receive(frame, 0.0)]) == 2
server.disconnect(connection, 1.0)
client.disconnected(1.0)
assert len(list(schemas())) > 30
'''


def package() -> Path:
    spec = importlib.util.find_spec("errata_protocol")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def all_modules() -> list[str]:
    root = package().parent
    names = (path.relative_to(root).with_suffix("").parts for path in sorted(package().rglob("*.py")))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def sealed(code: str, modules: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-W", "error", str(SEALED), str(package().parent), *modules]
    return subprocess.run(command, input=code, capture_output=True, text=True, timeout=HANGS_S, check=False)


def test_importing_and_using_every_module_touches_nothing() -> None:
    modules = all_modules()
    assert "errata_protocol.errors" in modules
    assert "errata_protocol.detect" in modules
    result = sealed(USE, modules)
    assert result.stdout == ""
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    "impure",
    [
        "open('/etc/hostname')",
        "from pathlib import Path; Path('/etc').stat()",
        "from pathlib import Path; list(Path('/etc').iterdir())",
        "import os; os.mkdir('/tmp/x')",
        "import time; time.time()",
        "import time; time.monotonic_ns()",
        "import datetime; datetime.datetime.now()",
        "import random; random.random()",
        "import os; os.urandom(8)",
        "import uuid; uuid.uuid4()",
        "import _thread; _thread.start_new_thread(print, ())",
        "import _socket; _socket.socket()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.fork()",
        "try:\n    open('/etc/hostname')\nexcept Exception:\n    pass",
    ],
)
def test_the_seal_catches(impure: str) -> None:
    result = sealed(impure, [])
    assert result.returncode == 3, result.stderr
    assert result.stdout.startswith("use: ")


def test_the_seal_catches_a_module_that_reads_a_file_when_imported(tmp_path: Path) -> None:
    (tmp_path / "impure.py").write_text("DATA = open(__file__, 'rb').read()\n")
    command = [sys.executable, "-P", str(SEALED), str(tmp_path), "impure"]
    result = subprocess.run(command, input="", capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert result.stdout.startswith("import: open")
