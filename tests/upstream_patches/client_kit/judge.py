"""Plays the scenarios to a client, and says which statements hold."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from .scenarios import SCENARIOS, STATEMENTS, Scenario
from .server import Server, serving
from .watch import Watch

PATIENCE_S = 90.0
"""How long an answer of the client may take beyond its deadline, in seconds."""
SLOWER = (1.0, 4.0, 16.0)
"""Factors of a scenario's short times, tried until the client keeps them: a machine may be slow."""


class Wrong(Exception):
    """The client broke a statement: its number, and how."""

    def __init__(self, statement: str, detail: str) -> None:
        super().__init__(statement, detail)
        self.statement, self.detail = statement, detail


class GaveUp(Wrong):
    """The client gave up what it should have had, which it may where the machine is slower than its times."""


@dataclass(frozen=True)
class Played:
    """What came of a scenario.

    Args:
        scenario: The scenario's name.
        outcome: ``pass``, ``fail`` or ``not tested``.
        statements: The statements that it shows.
        broken: The first statement that was broken.
        detail: What came, or why it was not tested.
    """

    scenario: str
    outcome: str
    statements: Sequence[str]
    broken: str | None = None
    detail: str = ""


class Program:
    """The running client.

    Args:
        process: The client's process.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    def give(self, *lines: dict[str, Any]) -> None:
        """Write requests to its standard input."""
        assert self.process.stdin is not None
        self.process.stdin.write("".join(json.dumps(line) + "\n" for line in lines).encode())

    async def answer(self, line_number: int) -> dict[str, Any]:
        """Return its next answer.

        Raises:
            Wrong: It ended, or printed something else.
        """
        assert self.process.stdout is not None
        text = await self.process.stdout.readline()
        if not text:
            raise Wrong("interface", f"the client ended before its answer to request {line_number}")
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not ("failed" in answer or {"type", "data"} <= set(answer)):
            raise Wrong("interface", f"this is no answer to request {line_number}: {text[:300]!r}")
        return answer


@asynccontextmanager
async def running(command: Sequence[str], url: str, timeout_s: float, deadline_s: float) -> AsyncIterator[Program]:
    """Start a client, and kill its process group at the end."""
    times = ["--timeout", f"{timeout_s:g}", "--deadline", f"{deadline_s:g}"]
    process = await asyncio.create_subprocess_exec(
        *command,
        *("--url", url, *times),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        limit=1 << 24,
    )
    try:
        yield Program(process)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        await process.communicate()


def check(scenario: Scenario, k: int, answer: dict[str, Any], watch: Watch) -> bool:
    """Check the answer to request k. Returns False if the client has no method for it.

    Raises:
        Wrong: It is not the reply, and the client was not to give up.
    """
    number, code, due = k + 1, answer.get("failed"), scenario.gives_up.get(k, ())
    statement = scenario.statement
    if scenario.knows == "c" and code is not None and watch.lost_and_not_repeated():
        statement = "C-11"
    if code == "NOT_SUPPORTED" and scenario.lines[k]["type"] == "mcp":
        return False
    if "failed" not in answer and {key: answer[key] for key in ("type", "data")} == watch.replies.get(k):
        if due:
            raise Wrong(scenario.statement, f"request {number} has a reply that the client cannot have: {answer}")
        return True
    if due:
        told = code if "failed" in answer else (answer.get("data") or {}).get("code")
        if told not in due:
            raise Wrong(statement, f"request {number} is to be given up with {' or '.join(due)}: {answer}")
    elif "failed" not in answer:
        late = [other + 1 for other in watch.replies if {**answer} == watch.replies[other]]
        other = f", which is that of request {late[0]}" if late else ""
        if late and "C-12" in (scenario.statement, *scenario.shows):
            statement = "C-12"
        raise Wrong("A-7" if scenario.knows == "a" else statement, f"request {number} got {answer}{other}")
    elif k not in scenario.may_fail:
        raise GaveUp(statement, f"request {number} was given up: {answer}")
    return True


async def play(command: Sequence[str], scenario: Scenario, factor: float) -> tuple[str, bool]:
    """Play a scenario. Returns why it was not tested, or nothing, and whether the client read a delivery again.

    Raises:
        Wrong: The client broke a statement.
        OSError: The command cannot be started.
    """
    watch = Watch(scenario.lines, scenario.faults, scenario.knows)
    server = Server(watch, scenario.knows, scenario.more, scenario.at_once)
    deadline_s = scenario.deadline_s * (factor if scenario.gives_up else 1)

    async def conversation(client: Program) -> str:
        if scenario.at_once:
            client.give(*scenario.lines)
        for k, line in enumerate(scenario.lines):
            if not scenario.at_once:
                client.give(line)
            try:
                async with asyncio.timeout(deadline_s + PATIENCE_S):
                    answer = await client.answer(k + 1)
            except TimeoutError:
                raise Wrong(scenario.statement, f"the client did not answer request {k + 1}") from None
            watch.answered = k + 1
            if not check(scenario, k, answer, watch):
                return "the client has no method for mcp"
        assert client.process.stdin is not None
        client.process.stdin.close()
        try:
            async with asyncio.timeout(PATIENCE_S):
                status = await client.process.wait()
        except TimeoutError:
            raise Wrong("interface", "the client did not exit at the end of its input") from None
        if status != 0:
            raise Wrong("interface", f"the client's exit status is {status}")
        if left := set(server.sessions) - server.closed:
            raise Wrong(
                "interface", f"the client left {len(left)} sessions that hold their slots: it did not close them"
            )
        return ""

    async with serving(server), running(command, server.url, scenario.timeout_s * factor, deadline_s) as client:
        talking = asyncio.ensure_future(conversation(client))
        failing = asyncio.ensure_future(watch.broken.wait())
        await asyncio.wait([talking, failing], return_when=asyncio.FIRST_COMPLETED)
        failing.cancel()
        if watch.failure is not None:
            talking.cancel()
            await asyncio.wait([talking])
            raise Wrong(*watch.failure)
        return await talking, watch.read


async def played(command: Sequence[str], scenario: Scenario) -> Played:
    """Play a scenario, more slowly where the client did not keep short times.

    Raises:
        OSError: The command cannot be started.
    """
    shown = (scenario.statement, *scenario.shows)
    short = scenario.timeout_s < Scenario.timeout_s
    for factor in SLOWER if short else SLOWER[:1]:
        try:
            untested, read = await play(command, scenario, factor)
            shown = tuple(one for one in shown if one != "A-7" or read)
            return Played(scenario.name, "not tested" if untested else "pass", shown, detail=untested)
        except GaveUp as wrong:
            last: Wrong = wrong
        except Wrong as wrong:
            last = wrong
            break
    return Played(scenario.name, "fail", shown, last.statement, last.detail)


async def judge(command: Sequence[str], jobs: int = 4) -> list[Played]:
    """Play all scenarios.

    Args:
        command: The client's command.
        jobs: How many scenarios are played at the same time, each with a server and a process of its own.

    Raises:
        OSError: The command cannot be started.
    """
    free = asyncio.Semaphore(jobs)

    async def one(scenario: Scenario) -> Played:
        async with free:
            return await played(command, scenario)

    return await asyncio.gather(*(one(scenario) for scenario in SCENARIOS))


def verdicts(results: Sequence[Played]) -> dict[str, tuple[str, list[str]]]:
    """Return for each statement ``pass``, ``fail`` or ``not tested``, with the reasons."""
    found = {}
    for statement in STATEMENTS:
        broken = [f"{one.scenario}: {one.detail}" for one in results if one.broken == statement]
        shown = [one for one in results if statement in one.statements]
        if broken:
            found[statement] = "fail", broken
        elif any(one.outcome == "pass" for one in shown):
            found[statement] = "pass", []
        else:
            why = [f"{one.scenario}: {one.detail or 'failed by ' + str(one.broken)}" for one in shown]
            found[statement] = "not tested", why or ["the client did nothing that it is about"]
    return found
