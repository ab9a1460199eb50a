"""Hints and votes, tried in forks of real episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from errata_client import Episodes, ErrataClient
from errata_protocol.errors import NotSupported
from errata_server.process import ServerProcess
from errata_trainer.assembly.counterfactual import CounterfactualCheck, Question, calls_of
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.episodes.tools import of_spec
from tests.environments.shelf import SPEC

SHELF = of_spec(SPEC)


@pytest.fixture
def runner(server: ServerProcess) -> Iterator[EpisodeRunner]:
    """An episode whose second call failed, and that was then ended wrongly."""

    def connect() -> Any:
        client: ErrataClient[Any, Any, Any] = ErrataClient(server.url)
        return client.sync()

    made = EpisodeRunner(SHELF, connect)
    made.reset({"place": "red", "word": "owl"})
    made.call("read", {"path": "red"})
    made.call("read", {"path": "green"})
    made.call("submit", {"word": "elk"})
    yield made
    made.close()


def asked(runner: EpisodeRunner, *calls: tuple[str, dict[str, Any]], key: str = "fs.missing") -> Question:
    return Question(runner, 2, calls, (("read", {"path": "green"}),), key)


RIGHT, WRONG = ("read", {"path": "red"}), ("read", {"path": "blue"})
SUBMITS = ("submit", {"word": "owl"})


def test_a_turn_whose_calls_succeed_is_better_and_one_that_fails_is_not(runner: EpisodeRunner) -> None:
    check = CounterfactualCheck("always")
    questions = [
        asked(runner, RIGHT),
        asked(runner, WRONG),
        asked(runner, RIGHT, WRONG),
        asked(runner),
        asked(runner, ("read", {"file": "red"})),
        asked(runner, ("open", {"path": "red"}), key="tool.unknown"),
    ]
    verdicts = check.ask(questions)
    assert [v.reason for v in verdicts if v] == [
        "error_gone", "still_fails", "still_fails", "no_call", "still_fails", "still_fails",
    ]  # fmt: skip
    assert [check.keeps(v) for v in verdicts] == [True, False, False, False, False, False]
    assert check.counts["fs.missing", "still_fails"] == 3
    metrics = check.metrics()
    assert metrics["counterfactual/asked"] == 6 and metrics["counterfactual/accepted/fs.missing"] == 0.2
    eids = [v.eid for v in verdicts if v and v.eid]
    assert len(set(eids)) == len(eids) and runner.eid not in eids, "each was played in a fork of its own"


def test_the_episode_itself_is_not_touched(runner: EpisodeRunner) -> None:
    before = list(runner.played)
    CounterfactualCheck("always").ask([asked(runner, RIGHT, SUBMITS)])
    assert runner.played == before and runner.finish() == 0.0


def test_rewards_are_compared_after_the_closing_tool(runner: EpisodeRunner) -> None:
    check = CounterfactualCheck("always", "reward")
    better, equal = check.ask([asked(runner, SUBMITS), asked(runner, RIGHT)])
    assert better is not None and (better.reason, better.before, better.after) == ("reward_higher", 0.0, 1.0)
    assert equal is not None and not equal.better and equal.reason == "reward_not_higher"


def test_what_breaks_in_the_fork_is_lost_and_counts_for_nothing(runner: EpisodeRunner) -> None:
    (verdict,) = CounterfactualCheck("always").ask([asked(runner, ("read", {"path": "broken"}))])
    assert verdict is not None and (verdict.better, verdict.reason) == (False, "lost")


def test_an_environment_that_cannot_be_forked_is_told_so(
    runner: EpisodeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(t: int) -> EpisodeRunner:
        raise NotSupported("this environment has no snapshot")

    monkeypatch.setattr(runner, "fork", refuse)
    (verdict,) = CounterfactualCheck("always").ask([asked(runner, RIGHT)])
    assert verdict is not None and verdict.reason == "not_forkable"


def test_a_budget_bounds_forks_and_says_what_was_not_asked(runner: EpisodeRunner) -> None:
    check = CounterfactualCheck("always", budget=2)
    verdicts = check.ask([asked(runner, RIGHT)] * 3)
    assert [v is not None for v in verdicts] == [True, True, False]
    assert [check.keeps(v) for v in verdicts] == [True, True, False], "always keeps nothing unasked"


def test_a_sample_is_drawn_by_its_seed_and_keeps_what_was_not_asked(runner: EpisodeRunner) -> None:
    drawn = []
    for _ in range(2):
        check = CounterfactualCheck("sample", rate=0.5, seed=3)
        verdicts = check.ask([asked(runner, WRONG)] * 12)
        drawn.append([v is not None for v in verdicts])
        assert [check.keeps(v) for v in verdicts] == [not was for was in drawn[-1]]
    assert drawn[0] == drawn[1] and 0 < sum(drawn[0]) < 12
    assert CounterfactualCheck().ask([asked(runner, WRONG)]) == [None] and CounterfactualCheck().keeps(None)


def test_verdicts_are_late_rewards_of_the_state_they_are_about(runner: EpisodeRunner, server: ServerProcess) -> None:
    check = CounterfactualCheck("always", episodes=Episodes(server.url))
    check.ask([asked(runner, RIGHT), asked(runner, WRONG)])
    client: ErrataClient[Any, Any, Any] = ErrataClient(server.url)
    with client.sync() as reader:
        posted = [r for r in reader.rewards(runner.eid) if r.source == "counterfactual"]
    assert [(r.t, r.value) for r in posted] == [(1, 1.0), (1, 0.0)] and check.not_posted == 0
    assert [r.reward_id.split(":")[2:4] for r in posted] == [
        ["fs.missing", "error_gone"],
        ["fs.missing", "still_fails"],
    ]


def test_a_server_that_takes_no_verdict_changes_none(runner: EpisodeRunner) -> None:
    check = CounterfactualCheck("always", episodes=Episodes("http://127.0.0.1:9"))
    (verdict,) = check.ask([asked(runner, RIGHT)])
    assert verdict is not None and verdict.better and check.not_posted == 1


@pytest.mark.parametrize("arguments", [{"path": "red"}, '{"path": "red"}'])
def test_arguments_of_a_sampled_call_may_be_an_object_or_its_text(arguments: Any) -> None:
    message = {"tool_calls": [{"type": "function", "function": {"name": "read", "arguments": arguments}}]}
    assert calls_of(message) == [("read", {"path": "red"})]


@pytest.mark.parametrize(
    "arguments", ['{"path"', "[1]", "[" * 100_000, None, 3], ids=["cut", "a list", "deep", "none", "a number"]
)
def test_a_sampled_call_whose_arguments_cannot_be_read_is_left_out(arguments: Any) -> None:
    calls = [{"function": {"name": "read", "arguments": given}} for given in (arguments, {})]
    assert calls_of({"tool_calls": calls}) == [("read", {})]
