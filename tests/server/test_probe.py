"""``errata probe``: two verdicts, and the parts they are made of; `tests/upstream_envs` has the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openenv.core.env_server.types import Action
from pydantic import Field
from typer.testing import CliRunner

from errata_protocol.errors import InvalidRequest
from errata_server.cli import commands
from errata_server.cli.probe import UNCLEAR
from errata_server.probe.actions import PYTHON, ActionGenerator
from errata_server.probe.requests import Request, recorded, with_reset
from errata_server.probe.verdict import compared, remaining_differences

REPEATABLE = "tests.server.repeatable"


def probed(target: str, *options: str, status: int = 0) -> dict[str, Any]:
    answer = CliRunner().invoke(commands.cli, ["probe", target, "--json", "--steps", "8", *options])
    assert answer.exit_code == status, answer.output
    return dict(json.loads(answer.stdout))


# -- verdicts, with servers in processes of their own ------------------------------------------------------------------


def test_a_stamp_is_named_as_volatile_takes_it() -> None:
    found = probed(f"{REPEATABLE}:StampedEnvironment")
    assert (found["recovery"], found["outcome"]) == ("reexecute", "verified")
    assert found["options"] == ["--deterministic", "--volatile", "$.metadata.stamp"]


def test_actions_without_effect_show_nothing() -> None:
    found = probed(f"{REPEATABLE}:MuteEnvironment", status=UNCLEAR)
    assert (found["outcome"], found["recovery"]) == ("unclear", "none")
    assert "--actions FILE" in found["why"][0]


def test_what_there_is_not_is_an_error_in_one_line() -> None:
    error = CliRunner().invoke(commands.cli, ["probe", "no_such_env"]).exception
    assert isinstance(error, InvalidRequest) and "no environment named 'no_such_env'" in error.message


# -- requests ----------------------------------------------------------------------------------------------------------


def test_recorded_lines_are_actions_resets_and_calls(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"reset": {"task": 3}}\n\n{"n": 1}\n{"step": {"n": 2}}\n{"mcp": {"name": "f", "arguments": {}}}\n')
    assert recorded(file) == [
        Request("reset", {"task": 3}),
        Request("step", {"n": 1}),
        Request("step", {"n": 2}),
        Request("mcp", {"name": "f", "arguments": {}}),
    ]


@pytest.mark.parametrize(
    ("text", "message"), [("", "no actions"), ("[1]", "line 1 is not a JSON object"), ("{", "is not JSON")]
)
def test_other_lines_are_refused(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        recorded(file)


def test_every_reset_has_a_seed_and_an_id_that_are_its_own_unless_they_were_recorded() -> None:
    made = with_reset([Request("step", {}), Request("reset", {"seed": 9})], 100)
    assert made == [
        Request("reset", {"seed": 100, "episode_id": "probe-0"}),
        Request("step", {}),
        Request("reset", {"seed": 9, "episode_id": "probe-2"}),
    ]


# -- actions -----------------------------------------------------------------------------------------------------------


class Move(Action):
    """A move.

    Attributes:
        kind: "break" (a wall), "water" or "wait".
        column: The column (0 to 6).
        code: What to run.
        turn: one of
            0 = left
            5 = right
        move: Where to.
    """

    kind: str
    column: int
    code: str
    turn: int
    move: str
    level: int = Field(default=1, ge=3, le=4)
    note: str | None = None


def test_actions_are_drawn_from_what_is_offered_said_and_allowed() -> None:
    generator = ActionGenerator(Move.model_json_schema(), 0)
    drawn = [generator.action({}) for _ in range(200)]
    assert {d["kind"] for d in drawn} == {"break", "water", "wait"}
    assert {d["column"] for d in drawn} == set(range(7))
    assert {d["turn"] for d in drawn} == {0, 5}
    assert {d["code"] for d in drawn} <= set(PYTHON)
    assert {d["level"] for d in drawn if "level" in d} == {3, 4}
    assert all(Move.model_validate(d) for d in drawn)
    assert not any("metadata" in d for d in drawn)
    offered = [generator.action({"legal_moves": ["e2e4", "d2d4"]})["move"] for _ in range(100)]
    assert sum(move in ("e2e4", "d2d4") for move in offered) > 70
    again = ActionGenerator(Move.model_json_schema(), 0)
    assert [again.action({}) for _ in range(200)] == drawn


# -- differences between plays -----------------------------------------------------------------------------------------


def answers(*observations: Any, **beside: Any) -> list[dict[str, Any]]:
    return [{"observation": o, "done": False, **beside} for o in observations]


def test_differences_are_sorted_by_what_they_need() -> None:
    first = answers({"a": 1, "took_s": 0.5, "names": ["x", "y"], "n": 1})
    second = answers({"a": 1, "took_s": 0.6, "names": ["y", "x"], "n": 2})
    third = answers({"a": 1, "took_s": 0.7, "names": ["x", "y"], "n": 3})
    found = compared(first, second, third)
    assert list(found.volatile) == [("observation", "took_s")]
    assert list(found.hash_order) == [("observation", "names")]
    assert list(found.real) == [("observation", "n")]


def test_after_a_real_difference_nothing_is_laid_on_the_hash_seed() -> None:
    first, second = answers({"n": 1}, {"m": [1, 2]}), answers({"n": 2}, {"m": [2, 1]})
    third = answers({"n": 3}, {"m": [1, 2]})
    found = compared(first, second, third)
    assert not found.hash_order and len(found.real) == 2


@pytest.mark.parametrize("path", ["reward", "done"])
def test_reward_and_done_are_never_excepted(path: str) -> None:
    first, second = [{"observation": {}, path: 1.8e9}], [{"observation": {}, path: 1.8e9 + 5}]
    assert not compared(first, second, second).volatile


def test_a_long_text_that_holds_a_time_is_not_excepted() -> None:
    log = "started\n" * 50
    first, second = answers({"log": log + "took 0.1 s"}), answers({"log": log + "took 0.2 s"})
    assert not compared(first, second, second).volatile
    assert compared(
        answers({"at": "took 0.1 s"}), answers({"at": "took 0.2 s"}), answers({"at": "took 0.2 s"})
    ).volatile


def test_the_turn_of_a_site_is_the_servers_and_does_not_count() -> None:
    one, other = ({"metadata": {"error_site": {"t": t}, "error_sites": [{"t": t, "line": 3}]}} for t in (15, 4))
    assert remaining_differences([one], [other], []) == []
    assert remaining_differences([{"t": 1}], [{"t": 2}], []) != []
