"""rfcs/reference/client.py survives illegal requests between legal ones, and connections that are lost among them."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from errata_server.app import create_fastapi_app
from errata_server.settings import Settings

from .protocol_exchanges import CLASSES
from .test_rfcs import served

PATH = Path(__file__).parents[1] / "rfcs" / "reference" / "client.py"
_spec = importlib.util.spec_from_file_location("reference_client", PATH)
assert _spec is not None and _spec.loader is not None
reference = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(reference)

MAX_FRAME = 4096
END_S = 60.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    app = create_fastapi_app(*CLASSES["tally"], max_concurrent_envs=8, settings=Settings(max_frame=MAX_FRAME))
    with served(app) as address:
        yield address.replace("http", "ws", 1) + "/ws"


NEVER_ADMITTED: list[dict[str, Any]] = [
    {"type": "step", "deadline_ms": -1},
    {"type": "step", "deadline_ms": True},
    {"type": "step", "if": []},
    {"type": "reset", "if": {"t": 0, "more": 1}},
    {"type": "mcp", "data": {"method": "tools/call"}, "if": {"t": -1}},
    {"type": "step", "data": {"n": float("nan")}},
    {"type": "step", "data": {"n": 1, "deep": eval("[" * 70 + "]" * 70)}},
    {"type": "step", "data": {"n": 1, "much": "x" * MAX_FRAME}},
]
RECORDED: list[dict[str, Any]] = [
    {"type": "step", "data": [1]},
    {"type": "step", "data": {"do": "fail"}},
    {"type": "step", "data": {"n": 1}, "deadline_ms": 0},
    {"type": "fork", "data": {}},
]
READS: list[dict[str, Any]] = [{"type": "state"}, {"type": "mcp", "data": []}, {"type": "nonsense"}]
STEPS = st.integers(1, 9).map(lambda n: {"type": "step", "data": {"n": n}})
LINES = st.lists(
    STEPS | STEPS | st.sampled_from(NEVER_ADMITTED) | st.sampled_from(RECORDED) | st.sampled_from(READS)
    | st.sampled_from(["cut", "wait"]),
    max_size=12,
)  # fmt: skip


async def played(url: str, lines: list[Any], sessions: int) -> dict[str, list[dict[str, Any]]]:
    """Send the lines in each session, with a reset before them; return what the client said of each."""
    said: dict[str, list[dict[str, Any]]] = {}
    client = reference.Client(url, lambda reply: said.setdefault(reply["session"], []).append(reply))
    running = asyncio.create_task(client.run())
    try:
        async with asyncio.timeout(END_S):
            for line in [{"type": "reset"}, *lines]:
                if line == "cut" and client.socket is not None:
                    client.socket.transport.abort()
                if isinstance(line, str):
                    await asyncio.sleep(0.001)
                    continue
                for n in range(sessions):
                    client.request({"session": f"s{n}", **line})
            idle = asyncio.create_task(client.idle.wait())
            await asyncio.wait([running, idle], return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
        if running.done():
            running.result()
    finally:
        running.cancel()
    return said


@given(lines=LINES, sessions=st.integers(1, 2))
@example(lines=[NEVER_ADMITTED[0], {"type": "step", "data": {"n": 1}}], sessions=1)
@example(
    lines=[NEVER_ADMITTED[0], NEVER_ADMITTED[1], {"type": "step", "data": {"n": 2}}, NEVER_ADMITTED[2]], sessions=2
)
@example(
    lines=[{"type": "step", "data": {"n": 1}}, NEVER_ADMITTED[7], "cut", {"type": "step", "data": {"n": 2}}], sessions=1
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_has_its_one_answer_and_legal_ones_take_effect_once(
    url: str, lines: list[Any], sessions: int
) -> None:
    said = asyncio.run(played(url, lines, sessions))
    asked = [line for line in lines if isinstance(line, dict)]
    totals, total = [0], 0
    for line in asked:
        if line not in NEVER_ADMITTED and line not in RECORDED and line["type"] == "step":
            totals.append(total := total + line["data"]["n"])
    assert len(said) == sessions
    for replies in said.values():
        seen = [reply["data"]["observation"]["total"] for reply in replies if reply["type"] == "observation"]
        assert seen == totals
        errors = [reply for reply in replies if reply["type"] == "error" and "q" not in reply]
        assert len(errors) == sum(line in NEVER_ADMITTED or line in RECORDED for line in asked)
        assert sum("q" in reply for reply in replies) == sum(line in READS for line in asked)
