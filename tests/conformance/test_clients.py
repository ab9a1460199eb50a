"""The kit's client side: the sample client and Errata's pass, each wrong client is caught by what it breaks."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response
from starlette.routing import Route

from errata_conformance.cli import main
from errata_conformance.client_side import program
from errata_conformance.client_side.program import Program
from errata_conformance.client_side.sample import DEFECTS, Client
from errata_conformance.client_side.scenarios import SCENARIOS, run_client
from errata_conformance.client_side.stage import Stage, staged
from errata_conformance.report import as_text
from errata_conformance.results import Broken, Outcome, grouped
from errata_conformance.statements import statements

from .client_mutation import Local

SAMPLE = [sys.executable, "-m", "errata_conformance.client_side.sample"]
REFERENCE = [sys.executable, str(Path(__file__).parents[2] / "rfcs" / "reference" / "client.py")]
OURS = [sys.executable, str(Path(__file__).parent / "our_client.py")]


def test_every_statement_that_binds_a_client_and_shows_has_a_scenario_and_a_wrong_client() -> None:
    known = statements()
    shows = {one.id for one in known.values() if one.side == "client" and one.tag != "inspection"}
    checked = {statement for statement, _, _ in SCENARIOS}
    assert shows <= checked <= set(known)
    assert checked <= {statement for statement, _ in DEFECTS.values()} <= set(known)
    assert len(DEFECTS) >= 12


@asynccontextmanager
async def sample_here(url: str, reply_s: float) -> AsyncIterator[Program]:
    """Start the sample client on this event loop: as a process it costs a start of Python in each scenario."""
    client = Local(Client(url, None), reply_s)
    try:
        yield client
    finally:
        client.working.cancel()


def test_the_sample_client_passes() -> None:
    results = asyncio.run(run_client(sample_here))
    assert {one.outcome for one in results} == {Outcome.PASSED}, as_text(results)


@pytest.mark.conformance
@pytest.mark.parametrize("command", [SAMPLE, OURS], ids=["sample", "errata_client"])
def test_a_right_client_passes(command: list[str]) -> None:
    results = asyncio.run(run_client(command))
    assert {one.outcome for one in results} == {Outcome.PASSED}, as_text(results)


async def test_a_line_that_is_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "LINE_BYTES", 1000)
    prints = [sys.executable, "-c", "print('x' * 3000, flush=True); input()"]
    async with program.program(prints, "http://127.0.0.1:1", 20.0) as client:
        with pytest.raises(Broken, match="printed a line of more than 1000 bytes"):
            await client.answer("s")


@pytest.mark.conformance
def test_the_reference_client_passes() -> None:
    results = asyncio.run(run_client(REFERENCE))
    assert {one.outcome for one in results} == {Outcome.PASSED, Outcome.NOT_SUPPORTED}, as_text(results)
    lacking = [one.statement for one in results if one.outcome is Outcome.NOT_SUPPORTED]
    plain = ["R-016-1", "R-015-7", "R-016-1", "R-015-9", "R-015-19", "R-015-13", "R-015-24"]
    assert lacking == plain, as_text(results)  # it leaves out plain sockets


@pytest.mark.conformance
@pytest.mark.parametrize("name", DEFECTS)
def test_every_wrong_client_is_caught_by_what_it_breaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("errata_conformance.client_side.scenarios.REPLY_S", 8.0)
    results = asyncio.run(run_client([*SAMPLE, "--defect", name]))
    found = [root.statement for root, _ in grouped(results)]
    assert found and found[0] == DEFECTS[name][0], as_text(results)


def test_the_command_holds_a_client(capsys: pytest.CaptureFixture[str]) -> None:
    sample = " ".join(SAMPLE)
    assert main(["--client", sample, "--only", "R-016-15", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["passed"] == 2
    assert main(["--client", f"{sample} --defect no-digest", "--only", "R-015-13"]) == 1
    assert "BROKEN R-015-13 (MUST)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([])


def test_a_client_that_cannot_be_started_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--client", "no-such-client --fast"]) == 2
    error = "[Errno 2] No such file or directory: 'no-such-client'"
    assert capsys.readouterr().err == f"errata conformance: --client: the program cannot be started: {error}\n"


@pytest.mark.parametrize(("command", "why"), [("", "the command is empty"), ("client 'x", "No closing quotation")])
def test_a_client_that_is_no_command_is_a_wrong_call(
    command: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--client", command])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: --client: {why}\n")


def refused_fork(answer: Response | None) -> dict[str, Any]:
    """Return the sample client's answer for a fork of a plain session at a t that does not exist.

    Args:
        answer: What the server answers over HTTP; None for its own error.
    """

    async def forked() -> dict[str, Any]:
        async with staged(Stage(multiplexed=False)) as stage:
            if answer is not None:
                path = "/episodes/{eid}/fork"
                stage.server.app.router.routes.insert(0, Route(path, lambda _: answer, methods=["POST"]))
            client = Client(stage.url, None)
            await client.handle({"session": "a", "type": "reset"})
            return await client.handle({"session": "a", "type": "fork", "data": {"t": 9, "child": "b"}})

    return asyncio.run(forked())


def test_the_sample_client_prints_the_error_of_a_fork() -> None:
    answer = refused_fork(None)
    assert (answer["type"], answer["data"]["code"]) == ("error", "T_OUT_OF_RANGE")


@pytest.mark.parametrize("body", ["Internal Server Error", "[]", '{"detail": "no"}'])
def test_the_sample_client_prints_the_status_of_a_fork_without_a_code(body: str) -> None:
    answer = refused_fork(Response(body, 500))
    assert (answer["type"], answer["data"]["code"]) == ("error", "HTTP_500")
    assert body in answer["data"]["message"]


def test_the_sample_client_says_that_a_fork_was_answered_in_another_form() -> None:
    answer = refused_fork(Response('{"child": "b"}', 200))
    assert (answer["type"], answer["data"]["code"]) == ("error", "HTTP_200")
    assert '{"child": "b"}' in answer["data"]["message"]
