"""The client kit of proposals A and C: right clients pass, each wrong one fails by the statement that it breaks."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from .client_kit.judge import Played, judge, verdicts
from .client_kit.scenarios import SCENARIOS, STATEMENTS
from .client_kit.server import Server, serving
from .client_kit.watch import Watch
from .kit_client import DEFECTS
from .trees import ROOT, apply, unpacked

pytestmark = pytest.mark.upstream_patches

HERE = Path(__file__).parent
SMALL = [sys.executable, str(HERE / "kit_client.py")]
CONSEQUENCES = {
    "no-capabilities": {"A-6"},
    "capabilities-once": {"A-6", "C-1", "C-9"},
    "no-repeat": {"C-9"},
}
"""What else a defect breaks, or may break."""


def found(results: list[Played], verdict: str) -> dict[str, list[str]]:
    """Return the statements of a verdict with their reasons."""
    return {name: why for name, (said, why) in verdicts(results).items() if said == verdict}


def test_the_statements_are_those_of_the_texts_and_each_has_a_scenario_and_a_wrong_client() -> None:
    texts = "".join(
        (ROOT / "rfcs" / "proposals" / f"{name}.md").read_text()
        for name in ("a-no-lost-replies", "c-repeat-safe-requests")
    )
    assert set(STATEMENTS) - {"interface"} <= set(re.findall(r"^- \*\*([AC]-\d+)\*\*", texts, re.M))
    shown = {statement for one in SCENARIOS for statement in (one.statement, *one.shows)}
    assert shown == set(STATEMENTS)
    assert set(DEFECTS.values()) | {"A-13"} == set(STATEMENTS)  # A-13 is a row of C-9


@pytest.mark.parametrize("options", [[], ["--keeps"]], ids=["drops", "keeps"])
def test_a_right_client_passes_whether_it_keeps_its_socket_or_not(options: list[str]) -> None:
    results = asyncio.run(judge([*SMALL, *options]))
    assert set(found(results, "pass")) == set(STATEMENTS), results


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_client_fails_by_what_it_breaks(defect: str) -> None:
    failed = found(asyncio.run(judge([*SMALL, "--defect", defect])), "fail")
    assert DEFECTS[defect] in failed, failed
    assert set(failed) <= {DEFECTS[defect]} | CONSEQUENCES.get(defect, set()), failed


def test_the_command_prints_a_table_or_json() -> None:
    kit = [sys.executable, "-m", "tests.upstream_patches.client_kit"]
    client = " ".join([*SMALL, "--defect", "number-id"])
    told = subprocess.run([*kit, client, "--json"], cwd=ROOT, capture_output=True, text=True, check=False)
    statements = json.loads(told.stdout)["statements"]
    assert told.returncode == 1 and statements["C-2"]["verdict"] == "fail"
    assert "no string of 1 to 255 characters: 5" in statements["C-2"]["why"][0]
    told = subprocess.run([*kit, client], cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(r"^C-2 +fail +an id is a string", told.stdout, re.M) and told.returncode == 1
    told = subprocess.run([*kit, "no-such-client"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 2 and "cannot be started" in told.stderr


class Unwatched(Watch):
    """Lets everything be sent."""

    def seen(self, *_: Any) -> None:
        """Return that no fault is due."""

    def fail(self, *_: str) -> None:
        """Break nothing."""


@pytest.mark.parametrize(("text", "knows"), [("a-no-lost-replies", "a"), ("c-repeat-safe-requests", "c")])
async def test_the_kits_server_says_what_the_examples_say(text: str, knows: str) -> None:
    """Which are recorded from the patched server."""
    blocks = re.findall(r"(?<=```exchange\n).*?(?=```)", (ROOT / "rfcs" / "proposals" / f"{text}.md").read_text(), re.S)
    for block in blocks:
        server = Server(Unwatched([], {}, knows), knows)
        session = server.rpc({"id": 1, "method": "openenv/session/create"})["result"]["session_id"]
        async with serving(server):
            ws: ClientConnection | None = None
            for line in block.splitlines():
                if line.startswith("# socket: "):
                    path = line.split()[2].replace("SESSION", session)
                    ws = await connect(server.url.replace("http", "ws") + path, proxy=None)
                elif line.startswith("# lost"):
                    assert ws is not None
                    await ws.close()
                elif line.startswith("> "):
                    assert ws is not None
                    await ws.send(line[2:])
                elif line.startswith("< "):
                    assert ws is not None
                    assert json.loads(await ws.recv()) == json.loads(line[2:])
            assert ws is not None
            await ws.close()
    assert blocks


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OpenEnv with the patches of A and C."""
    tree = unpacked("wheel", tmp_path_factory.mktemp("ac"))
    for letter in "ac":
        (patch,) = (ROOT / "rfcs" / "upstream").glob(f"{letter}-*.patch")
        apply(tree, patch)
    return tree


def test_patched_openenvs_client_passes(patched: Path) -> None:
    """Which has `recovery_timeout_s`, as 0.10.0 has not."""
    driver = ["env", f"PYTHONPATH={patched / 'src'}", sys.executable, str(HERE / "kit_drivers.py"), "openenv"]
    results = asyncio.run(judge(driver))
    assert set(found(results, "pass")) == set(STATEMENTS), results
    assert [one.scenario for one in results if one.outcome == "not tested"] == ["mcp messages, one of which is cut"]


def test_our_client_passes() -> None:
    results = asyncio.run(judge([sys.executable, str(HERE / "kit_drivers.py"), "errata"]))
    assert {one.outcome for one in results} == {"pass"}, results
    assert set(found(results, "not tested")) == {"A-7"}  # which it does not use
