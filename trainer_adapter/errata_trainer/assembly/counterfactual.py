"""Checks in the real environment whether a hint, or a teacher's choice, gives a better outcome.

The episode is forked at the state before the failing turn, the alternative turn is played in the fork, and the training
item is kept only if the outcome is better. The episode itself does not change, and the student never sees a fork.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from errata_client import Episodes
from errata_client.sync import run_blocking
from errata_protocol.errors import ErrataError, NotSupported
from errata_protocol.replay import RewardPost

from ..episodes.playing import Episode, EpisodeRunner
from ..rollouts.transcript import parsed_call

SOURCE = "counterfactual"
"""The source of rewards that verdicts are posted as."""

POSTING_S = 30.0

log = logging.getLogger("errata.trainer")

Mode = Literal["off", "sample", "always"]
Criterion = Literal["error", "reward"]
Calls = Sequence[tuple[str, Mapping[str, Any]]]
"""Tool calls of a turn: name and arguments, in order."""

BETTER = ("error_gone", "reward_higher")
"""Reasons of verdicts that keep what was asked about."""

Reason = Literal["error_gone", "reward_higher", "still_fails", "no_call", "reward_not_higher", "lost", "not_forkable"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a turn that was played in a fork.

    Attributes:
        better: Whether the turn went better than the student's own.
        reason: Reason of the outcome: one of `BETTER` if the turn was better, else why it was not.
        eid: The fork's episode; None if there was no fork.
        before: Reward that the student's own turn leads to; None if rewards were not compared.
        after: Reward that the other turn leads to; None if rewards were not compared.
    """

    better: bool
    reason: Reason
    eid: str | None = None
    before: float | None = None
    after: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """An alternative turn to play in a fork, in place of a failing turn.

    Attributes:
        runner: Runner of the episode, which need not be over.
        t: First delivery of the student's turn; the fork starts at the delivery before it.
        calls: Tool calls to play in the fork instead of the student's.
        own_calls: The student's own calls, needed to compare rewards.
        key: Name that the verdict is counted under, e.g. the ``hint_template_key``.
    """

    runner: Episode
    t: int
    calls: Calls
    own_calls: Calls = ()
    key: str = ""


@dataclass(slots=True)
class CounterfactualCheck:
    """Plays alternative turns in forks, within a rate and a budget.

    Args:
        mode: ``off``; ``sample`` asks about a share of the questions and keeps the others unasked; ``always`` asks
            about all and drops what the budget did not reach.
        criterion: ``error``: better is a turn whose calls all succeed. ``reward``: better is a turn after which the
            closing tool gives a higher reward than after the student's own, played in a second fork.
        rate: Share of the questions that ``sample`` asks about, in [0, 1].
        budget: Most forks in one `ask`; with ``reward`` a question takes two.
        seed: Seed of the sample.
        threads: Questions played at the same time.
        episodes: The server's journal, where each verdict is posted as a late reward of the state it is about: source
            ``counterfactual``, 1 for better, its id naming key, reason and fork. A recipe that sums late rewards has to
            leave it out. None posts nothing.

    Attributes:
        counts: Verdicts by key and reason, from the beginning: ``counts["fs.missing", "error_gone"]``.
        not_posted: Verdicts that the server did not take.
    """

    mode: Mode = "off"
    criterion: Criterion = "error"
    rate: float = 0.25
    budget: int = 64
    seed: int = 0
    threads: int = 16
    episodes: Episodes | None = None
    not_posted: int = 0
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _chance: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate is a share, got {self.rate}")
        self._chance = random.Random(self.seed)

    def ask(self, questions: Iterable[Question]) -> list[Verdict | None]:
        """Choose among questions by mode, rate and budget, and return the verdict of each; None for one that was not
        played."""
        asked = list(questions)
        verdicts: list[Verdict | None] = [None] * len(asked)
        chosen = self.chosen(len(asked))
        for n, verdict in zip(chosen, self.answers([asked[n] for n in chosen]), strict=True):
            verdicts[n] = verdict
        return verdicts

    def chosen(self, count: int) -> list[int]:
        """Return the indices of the questions to play, chosen by mode, rate and budget, in ascending order.

        It is asked before the student samples another turn for each, so that none is sampled in vain.
        """
        if self.mode == "off":
            return []
        chosen = [n for n in range(count) if self.mode == "always" or self._chance.random() < self.rate]
        return chosen[: self.budget // (2 if self.criterion == "reward" else 1)]

    def answers(self, questions: Sequence[Question]) -> list[Verdict]:
        """Play every question in a fork of its episode and return the verdicts.

        Up to ``threads`` questions are played at a time. The verdicts are added to ``counts`` and, if ``episodes`` is
        set, posted to the server.

        Returns:
            One verdict for each question, in the same order. A question that could not be played is not accepted, with
            reason ``no_call``, ``not_forkable`` or ``lost``.
        """
        if not questions:
            return []
        with ThreadPoolExecutor(min(self.threads, len(questions)), "errata-forks") as threads:
            verdicts = list(threads.map(self._ask, questions))
        for question, verdict in zip(questions, verdicts, strict=True):
            self.counts[question.key, verdict.reason] += 1
        if self.episodes is not None:
            run_blocking(self._post(self.episodes, list(zip(questions, verdicts, strict=True))))
        return verdicts

    def weight(self, key: str) -> float:
        """Return the loss weight of hints of a key that were not checked, in (0, 1]: the share of its checked hints
        that helped.

        It is twice the expected share, with one success and one failure added, at most 1: 1 before any question and
        while at least half of the hints help, 0.2 after eight that did not.
        """
        asked = sum(count for (of, _), count in self.counts.items() if of == key)
        better = sum(self.counts[key, reason] for reason in BETTER)
        return min(1.0, 2.0 * (better + 1) / (asked + 2))

    async def _post(self, episodes: Episodes, judged: Sequence[tuple[Question, Verdict]]) -> None:
        """Post verdicts to the server, one episode at a time. Failures are counted and logged, and change no
        verdict."""
        posts: dict[str, list[RewardPost]] = {}
        for question, verdict in judged:
            if question.runner.eid is None or verdict.eid is None:
                continue
            t = question.t - 1
            name = f"{SOURCE}:{t}:{question.key}:{verdict.reason}:{verdict.eid}"
            post = RewardPost(t=t, value=float(verdict.better), source=SOURCE, reward_id=name)
            posts.setdefault(question.runner.eid, []).append(post)
        for eid, rewards in posts.items():
            try:
                async with asyncio.timeout(POSTING_S):
                    await episodes.post_rewards(eid, rewards)
            except (ErrataError, OSError, TimeoutError) as error:
                self.not_posted += len(rewards)
                log.warning("verdicts on episode %s were not posted: %s", eid, error)

    def keeps(self, verdict: Verdict | None) -> bool:
        """Return whether an item with this verdict is trained on."""
        return verdict.better if verdict is not None else self.mode != "always"

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: verdicts by key, and the state of the random sample."""
        version, words, extra = self._chance.getstate()
        counts = [[key, reason, count] for (key, reason), count in self.counts.items()]
        return {"counts": counts, "not_posted": self.not_posted, "chance": [version, list(words), extra]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        version, words, extra = state["chance"]
        self._chance.setstate((version, tuple(words), extra))
        self.counts = Counter({(key, reason): count for key, reason, count in state["counts"]})
        self.not_posted = int(state["not_posted"])

    def metrics(self) -> dict[str, float]:
        """Return the share of checked hints that helped, in all and by key, and how many were checked."""
        return acceptance(self.counts)

    def _ask(self, question: Question) -> Verdict:
        """Try the calls of a question in forks of its episode, and return whether they are better than the student's.

        A question without calls is not tried. A fork that fails, also by a timeout, gives a verdict (``lost``,
        ``not_forkable``) and no exception.
        """
        if not question.calls:
            return Verdict(False, "no_call")
        try:
            if self.criterion == "error":
                return _tried(question, question.calls, _by_error)
            own = _tried(question, question.own_calls, _by_reward)
            other = _tried(question, question.calls, _by_reward)
        except NotSupported:
            return Verdict(False, "not_forkable")
        except (ErrataError, OSError, TimeoutError):
            return Verdict(False, "lost")
        if "lost" in (own.reason, other.reason):
            return Verdict(False, "lost")
        better = (other.after or 0.0) > (own.after or 0.0)
        return Verdict(better, "reward_higher" if better else "reward_not_higher", other.eid, own.after, other.after)


def acceptance(counts: Mapping[tuple[str, str], int]) -> dict[str, float]:
    """Return ``counterfactual/accepted``, ``counterfactual/accepted/KEY`` and ``counterfactual/asked``.

    Args:
        counts: Verdicts by key and reason, of one check or added up over ranks.
    """
    asked: Counter[str] = Counter()
    better: Counter[str] = Counter()
    for (key, reason), count in counts.items():
        asked[key] += count
        better[key] += count * (reason in BETTER)
    found = {f"counterfactual/accepted/{key}": better[key] / asked[key] for key in sorted(asked) if key}
    total = asked.total()
    if total:
        found["counterfactual/accepted"] = better.total() / total
    found["counterfactual/asked"] = float(total)
    return found


def calls_of(message: Mapping[str, Any]) -> Calls:
    """Return the tool calls of a parsed assistant message whose arguments could be read."""
    calls = map(parsed_call, message.get("tool_calls") or ())
    return [(name, arguments) for name, arguments in calls if arguments is not None]


def _tried(question: Question, calls: Calls, judge: Callable[[EpisodeRunner, bool], Verdict]) -> Verdict:
    runner = question.runner.fork(question.t - 1)
    try:
        refused = False
        for name, arguments in calls:
            if name not in runner.environment.tools:
                refused = True  # a trainer answers such a call itself, and the student goes on
                continue
            try:
                runner.call(name, arguments)
            except TypeError:
                refused = True
        return judge(runner, refused)
    finally:
        runner.close()


def _by_error(runner: EpisodeRunner, refused: bool) -> Verdict:
    if runner.lost is not None:
        return Verdict(False, "lost", runner.eid)
    failed = refused or any(call.marker is not None and call.marker.severity != "warning" for call in runner.played)
    return Verdict(not failed, "still_fails" if failed else "error_gone", runner.eid)


def _by_reward(runner: EpisodeRunner, refused: bool) -> Verdict:
    reward = runner.finish()
    if runner.lost is not None:
        return Verdict(False, "lost", runner.eid)
    return Verdict(False, "reward_not_higher", runner.eid, after=reward)
