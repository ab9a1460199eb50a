"""A student and an environment in turn: ends, tokens, words of failures, and 64 side by side in virtual time."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from errata_protocol.errors import InvalidRequest, SandboxFailed, SessionLost
from errata_server.simulation import simulated
from errata_trainer.assembly.batch import Transcripts, rollouts_of
from errata_trainer.episodes.awaited import AwaitedRunner
from errata_trainer.episodes.conversation import Conversation, ConversationLimits, Heard, StudentTurn, converse
from errata_trainer.episodes.tools import of_spec
from errata_trainer.rollouts.transcript import unmarked_errors
from tests.environments.shelf import SPEC

SHELF = of_spec(SPEC)
END = 9
"""The token that ends a turn."""

PROMPT = [{"role": "system", "content": "Look."}, {"role": "user", "content": "Find it. "}]


def call(name: Any, arguments: Any = None) -> dict[str, Any]:
    given = {"path": "red"} if arguments is None else arguments
    return {"type": "function", "function": {"name": name, "arguments": given}}


class Session:
    """A session with slow calls of ``read``, whose episode ends when a word is submitted.

    Args:
        name: Key of its episode.
        slow_s: Time that each ``read`` takes, in seconds.
        failure: Exception of the first ``read``; None for none.
    """

    def __init__(self, name: str = "e", slow_s: Sequence[float] = (), failure: Exception | None = None) -> None:
        self.eid: str | None = None
        self.t: int | None = None
        self.asked: list[Any] = []
        self._name, self._slow_s, self._failure = name, list(slow_s), failure

    async def reset(self, **task: Any) -> Any:
        self.eid, self.t = self._name, 0
        return SimpleNamespace(observation={"text": "Go."}, reward=None, done=False, metadata=None)

    async def step(self, action: Any) -> Any:
        self.asked.append(action)
        if action["tool"] == "read":
            await asyncio.sleep(self._slow_s.pop(0) if self._slow_s else 0.0)
            if self._failure is not None:
                raise self._failure
        self.t = (self.t or 0) + 1
        done = action["tool"] == "submit"
        text = "right" if done else f"read {action['path']}"
        return SimpleNamespace(observation={"text": text}, reward=1.0 if done else None, done=done, metadata=None)

    async def close(self) -> None:
        self.asked.append("closed")


class Student:
    """A student that says what a script says: a turn of the calls given, each as two tokens, and the end.

    Args:
        turns: Calls of each turn.
        think_s: Time that a turn takes to generate, in seconds.
        obeys: Whether turns are cut to the room that there is.
        logprobs: Whether turns have log-probabilities.
        replaced: Tokens of a turn that the template says again.
    """

    def __init__(
        self,
        *turns: Sequence[Mapping[str, Any]],
        think_s: float = 0.0,
        obeys: bool = True,
        logprobs: bool = True,
        replaced: int = 0,
    ) -> None:
        self.heard: list[Any] = []
        self.rooms: list[int | None] = []
        self._turns, self._think_s, self._obeys = list(turns), think_s, obeys
        self._logprobs, self._replaced = logprobs, replaced

    async def begin(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        self.heard.append([dict(message) for message in messages])
        return [1, 2, 3]

    async def turn(self, room: int | None) -> StudentTurn:
        self.rooms.append(room)
        await asyncio.sleep(self._think_s)
        calls = list(self._turns.pop(0)) if self._turns else []
        ids = [*range(20, 20 + 2 * len(calls)), END]
        message: dict[str, Any] = {"role": "assistant", "content": f"{len(calls)} calls", "tool_calls": calls}
        cut = self._obeys and room is not None and len(ids) > room
        if cut:
            ids, message = ids[:room], {"role": "assistant", "content": "..."}
        return StudentTurn(ids, message, [-0.5] * len(ids) if self._logprobs else None, cut)

    async def hear(self, messages: Sequence[Mapping[str, Any]]) -> Heard:
        self.heard.append([dict(message) for message in messages])
        return Heard([END] * self._replaced + [40] * len(messages) + [41], self._replaced)


def runner_of(session: Session, **limits: float) -> AwaitedRunner:
    async def connect() -> Session:
        return session

    return AwaitedRunner(SHELF, connect, **limits)


async def played(
    student: Student, session: Session | None = None, **limits: Any
) -> tuple[Conversation, AwaitedRunner, Session]:
    session = session or Session()
    runner = runner_of(session)
    tools = limits.pop("tools", None)
    made = await converse(student, runner, PROMPT, {"place": "red"}, tools=tools, limits=ConversationLimits(**limits))
    return made, runner, session


READ, SUBMIT = call("read"), call("submit", {"word": "owl"})


@simulated
async def test_a_conversation_ends_when_the_student_calls_nothing_and_the_closing_tool_pays() -> None:
    student = Student([READ], [])
    made, runner, session = await played(student)
    assert (made.end, made.reward) == ("no_call", 1.0)
    assert made.prompt == [PROMPT[0], {"role": "user", "content": "Find it. Go."}] == student.heard[0]
    assert PROMPT[1]["content"] == "Find it. ", "the row is left as it was"
    assert (made.prompt_ids, made.completion_ids) == ([1, 2, 3], [20, 21, END, 40, 41, END])
    assert made.mask == [1, 1, 1, 0, 0, 1]
    assert made.logprobs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5]
    assert [message["role"] for message in made.messages] == ["assistant", "tool", "assistant"]
    assert student.heard[1] == [{"role": "tool", "name": "read", "content": "read red"}]
    assert session.asked == [{"tool": "read", "path": "red"}, {"tool": "submit"}], "the runner stays open"
    assert runner.record.finished and runner.task == {"place": "red"}


@simulated
async def test_a_conversation_ends_with_the_episode() -> None:
    student = Student([READ, SUBMIT, READ], [READ])
    made, runner, _ = await played(student)
    assert (made.end, made.reward, len(student.rooms)) == ("done", 1.0, 1)
    assert made.completion_ids == [20, 21, 22, 23, 24, 25, END] and set(made.mask) == {1}
    assert [message.get("content") for message in made.messages] == [
        "3 calls", "read red", "right", "[the episode is over]",
    ]  # fmt: skip
    assert [played.t for played in runner.played] == [1, 2, None]


@simulated
async def test_the_last_turn_is_played_and_not_answered() -> None:
    student = Student([READ], [READ], [READ])
    made, runner, _ = await played(student, turns=2)
    assert (made.end, len(student.rooms), len(student.heard)) == ("turns", 2, 2)
    assert made.mask == [1, 1, 1, 0, 0, 1, 1, 1]
    assert [played.t for played in runner.played] == [1, 2, 3], "the third is the closing tool's"


@pytest.mark.parametrize(
    ("tokens", "ids", "roles", "read"),
    [
        (2, 2, "a", 0),  # the first turn is cut
        (3, 3, "a", 1),  # its result does not fit
        (4, 3, "a", 1),
        (5, 5, "at", 1),  # no room is left
        (6, 6, "ata", 1),  # the second turn is cut
        (7, 7, "ata", 1),
        (8, 8, "ata", 2),
        (9, 8, "ata", 2),
    ],
)
@pytest.mark.parametrize("obeys", [True, False])
@simulated
async def test_a_full_completion_is_cut_everywhere_alike(
    tokens: int, ids: int, roles: str, read: int, obeys: bool
) -> None:
    student = Student([READ], [READ], [], obeys=obeys)
    made, _, session = await played(student, completion_tokens=tokens)
    assert made.end == "length"
    assert made.completion_ids == [20, 21, END, 40, 41, 20, 21, END][:ids]
    assert made.mask == [1, 1, 1, 0, 0, 1, 1, 1][:ids]
    assert made.logprobs == [-0.5, -0.5, -0.5, 0.0, 0.0, -0.5, -0.5, -0.5][:ids]
    assert "".join(message["role"][0] for message in made.messages) == roles
    assert session.asked.count({"tool": "read", "path": "red"}) == read, "a turn that is cut calls nothing"
    assert student.rooms[0] == tokens


@simulated
async def test_a_prompt_that_is_too_long_is_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"'place': 'red'.* has 3 tokens, and prompt_tokens=2"):
        await played(Student(), prompt_tokens=2)


@simulated
async def test_tokens_that_the_template_says_again_are_replaced() -> None:
    made, _, _ = await played(Student([READ], [], replaced=1))
    assert made.completion_ids == [20, 21, END, 40, 41, END]
    assert made.mask == [1, 1, 0, 0, 0, 1] and made.logprobs == [-0.5, -0.5, 0.0, 0.0, 0.0, -0.5]


@simulated
async def test_without_log_probabilities_a_conversation_has_none() -> None:
    made, _, _ = await played(Student([READ], [], logprobs=False))
    assert made.logprobs is None

    class Wrong(Student):
        async def turn(self, room: int | None) -> StudentTurn:
            return StudentTurn([1, 2], {"role": "assistant", "content": ""}, [-0.5])

    with pytest.raises(ValueError, match="1 log-probabilities for the 2 tokens of a turn"):
        await played(Wrong())


@simulated
async def test_a_prompt_of_blocks_gets_a_block() -> None:
    student = Student()
    blocks = [{"type": "text", "text": "Find it. "}]
    await converse(student, runner_of(Session()), [{"role": "user", "content": blocks}], {})
    assert student.heard[0][0]["content"] == [*blocks, {"type": "text", "text": "Go."}] and len(blocks) == 1
    with pytest.raises(InvalidRequest, match="no message"):
        await converse(student, runner_of(Session()), [], {})


MISTAKES = {
    "unknown tool": (call("open"), "Tool open not found.", "tool_not_found"),
    "tool that was not given": (call("submit", {}), "Tool submit not found.", "tool_not_found"),
    "no name": (call(None), "Tool None not found.", "tool_not_found"),
    "no object": (call("read", ["red"]), "read() argument after ** must be a mapping, not list", "invalid_arguments"),
    "no json": (call("read", "{red"), "read() argument after ** must be a mapping, not str", "invalid_arguments"),
    "null": (call("read", "null"), "read() argument after ** must be a mapping, not NoneType", "invalid_arguments"),
    "wrong name": (call("read", {"file": "x"}), "read() has no argument 'file': it takes path", "invalid_arguments"),
    "wrong name as text": (
        call("read", '{"file": "x"}'),
        "read() has no argument 'file': it takes path",
        "invalid_arguments",
    ),
    "other kind": (
        {"type": "custom", "name": "read", "function": {"name": "read", "arguments": {}}},
        "Unsupported tool call type: custom",
        "tool_not_found",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@simulated
async def test_a_mistake_is_told_in_trls_words_and_marked_in_the_rollout(mistake: str) -> None:
    given, text, kind = MISTAKES[mistake]
    made, runner, _ = await played(Student([given, READ], []), tools=["read"])
    assert made.messages[1]["content"] == str({"error": text})
    assert made.messages[2]["content"] == "read red"
    transcripts = Transcripts(
        [made.prompt], [made.prompt_ids], [made.completion_ids], [made.mask], [made.messages], None
    )
    schemas = [{"name": "read", "parameters": SHELF.tools["read"].parameters}]

    class Finished:
        environment, eid, task, lost = SHELF, runner.eid, runner.task, runner.lost
        finish, deliveries = staticmethod(lambda: made.reward), staticmethod(runner.deliveries)

    (rollout,), unread = rollouts_of(transcripts, [Finished()], tools=schemas, end_ids=[END])  # type: ignore[list-item]
    assert unread == 0 and len(rollout.turns) == 2 and not rollout.truncated and rollout.reward == 1.0
    wrong, right = rollout.turns[0].calls
    assert wrong.marker is not None and wrong.marker.error_kind == kind
    assert (right.t, right.marker) == (1, None)
    assert unmarked_errors(rollout, made.messages, runner.deliveries()) == 0


def test_trl_has_the_same_words() -> None:
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    assert 'f"Tool {name} not found."' in source and '{"error": str(e)}' in source
    assert '{"error": f"Unsupported tool call type: ' in source and '"role": "tool", "name": name, "content"' in source


@simulated
async def test_a_lost_episode_ends_its_conversation_and_is_no_reward() -> None:
    student = Student([READ, READ], [READ])
    made, runner, session = await played(student, Session(failure=SandboxFailed("gone")))
    assert (made.end, made.reward, len(student.rooms)) == ("lost", None, 1)
    assert runner.record.lost_code == "SANDBOX_FAILED" and session.asked[-1] == "closed"

    async def connect() -> Session:
        raise ConnectionError("nobody there")

    student, runner = Student([READ]), AwaitedRunner(SHELF, connect)
    made = await converse(student, runner, PROMPT, {})
    assert (made.end, made.reward, made.prompt_ids, student.heard) == ("lost", None, [], [])
    assert made.prompt == PROMPT and runner.lost is not None


@simulated
async def test_a_closing_tool_that_fails_loses_the_conversation() -> None:
    class Broken(Session):
        async def step(self, action: Any) -> Any:
            raise SessionLost("gone")

    made, _, _ = await played(Student([]), Broken())
    assert (made.end, made.reward) == ("lost", None) and made.completion_ids == [END]


EPISODES, TURNS = 64, 5


@simulated
async def test_sixty_four_episodes_wait_side_by_side_and_the_batch_ends_with_its_slowest() -> None:
    clock = asyncio.get_running_loop().time
    slow_s = [[0.25 * ((7 * row + 3 * turn) % 16) for turn in range(TURNS)] for row in range(EPISODES)]
    think_s = [0.125 * (row % 5) for row in range(EPISODES)]
    ended: dict[int, float] = {}

    async def play(row: int) -> Conversation:
        failure = SessionLost("gone") if row == 11 else None
        runner = runner_of(Session(f"e-{row}", slow_s[row], failure), call_s=2.0 if row == 23 else 600.0)
        turns = [[READ]] * TURNS
        student = Student(*turns, think_s=think_s[row]) if row != 37 else Silent(*turns)
        try:
            return await converse(student, runner, PROMPT, {})
        finally:
            await runner.close()
            ended[row] = clock()

    class Silent(Student):
        async def turn(self, room: int | None) -> StudentTurn:
            raise RuntimeError("the generator was stopped")

    found = await asyncio.gather(*(play(row) for row in range(EPISODES)), return_exceptions=True)
    expected = {row: sum(slow_s[row]) + (TURNS + 1) * think_s[row] for row in range(EPISODES)}
    late = next(turn for turn, seconds in enumerate(slow_s[23]) if seconds > 2.0)
    expected[11] = slow_s[11][0] + think_s[11]
    expected[23] = sum(slow_s[23][:late]) + 2.0 + (late + 1) * think_s[23]
    expected[37] = 0.0
    assert ended == expected and clock() == max(expected.values())
    assert isinstance(found[37], RuntimeError)
    ends = {row: one.end for row, one in enumerate(found) if isinstance(one, Conversation)}
    assert {row for row, end in ends.items() if end != "no_call"} == {11, 23}
    assert all(one.reward == 1.0 for row, one in enumerate(found) if row not in (11, 23, 37))  # type: ignore[union-attr]


@pytest.mark.parametrize("limit", ["turns", "completion_tokens", "prompt_tokens"])
def test_limits_that_leave_nothing_are_refused(limit: str) -> None:
    with pytest.raises(ValueError, match=f"{limit} is 0"):
        ConversationLimits(**{limit: 0})
