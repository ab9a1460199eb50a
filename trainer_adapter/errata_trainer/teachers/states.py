"""Chooses the states that teachers are asked about.

A choice depends on its arguments only. States come in order of importance, so a budget or a deadline leaves out the
least important ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ..rollouts.rollout import Rollout, Turn, state_of_turns
from ..rollouts.transcript import MALFORMED
from .actions import Action
from .ballot import Ask

Policy = Literal["all", "error_sites", "entropy", "value_gap"]


@dataclass(frozen=True, slots=True)
class Site:
    """A state at which the student acted.

    Attributes:
        rollout: Index of the rollout, from 0.
        turn: The student's turn at the state.
        t: Delivery whose payload is the state; None without a journal.
        score: Score that the state was chosen by; None if the policy has none.
    """

    rollout: int
    turn: Turn
    t: int | None
    score: float | None = None


def choose(
    rollouts: Sequence[Rollout],
    policy: Policy = "error_sites",
    *,
    scores: Sequence[Sequence[float | None]] | None = None,
    most: int | None = None,
) -> list[Site]:
    """Return the states to ask about, the most important first.

    ``all`` and ``error_sites`` take turns from each rollout in turn, its first ones first: an early error is the cause
    of later ones. ``entropy`` and ``value_gap`` take the highest scores. Rollouts that were lost are left out.

    Args:
        rollouts: Finished rollouts.
        policy: Rule of choice: ``all``; ``error_sites``, turns with an error; ``entropy``, where the student was least
            sure; ``value_gap``, where most reward is at stake.
        scores: Score of each turn, by rollout and the turn's index; a turn with None is left out. Required for
            ``value_gap``. For ``entropy``, None estimates it by the mean surprisal of the sampled tokens, `surprisal`.
        most: Most states to return; None for no limit.

    Raises:
        ValueError: The policy is none, or needs scores.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy is {policy!r}: {', '.join(get_args(Policy))}")
    if policy == "value_gap" and scores is None:
        raise ValueError("value_gap needs scores: only the trainer knows what a state is worth")
    found: list[tuple[tuple[float, ...], Site]] = []
    for number, rollout in enumerate(rollouts):
        if rollout.lost is not None:
            continue
        states = state_of_turns(rollout)
        rank = 0
        for turn in rollout.turns:
            score = _score(rollout, number, turn, policy, scores)
            if (policy == "error_sites" and turn.failed is None) or (
                policy in ("entropy", "value_gap") and score is None
            ):
                continue
            order = (-score, number, turn.index) if score is not None else (rank, number, turn.index)
            found.append((order, Site(number, turn, states[turn.index], score)))
            rank += 1
    found.sort(key=lambda entry: entry[0])
    return [site for _, site in found[:most]]


def surprisal(rollout: Rollout, turn: Turn) -> float | None:
    """Return the mean of -log p of a turn's sampled tokens, in nats, as an estimate of its entropy.

    None where log-probabilities are unknown, or the turn is empty.
    """
    if rollout.logprobs is None or turn.stop <= turn.start:
        return None
    return -sum(rollout.logprobs[turn.start : turn.stop]) / (turn.stop - turn.start)


def ask_of(
    site: Site,
    rollout: Rollout,
    *,
    text: str = "",
    prompt: Sequence[Mapping[str, Any]] = (),
    transcript: Sequence[Mapping[str, Any]] | None = None,
) -> Ask:
    """Return the `Ask` for a state.

    Args:
        site: State to ask about.
        rollout: Rollout of the state.
        text: The student's text in the turn: its final answer, where it called no tool.
        prompt: Messages before the episode.
        transcript: The conversation up to the turn, its prompt included, for where there is no journal; None without
            one.
    """
    malformed = any(call.name == MALFORMED for call in site.turn.calls)
    return Ask(
        student=None if malformed else Action.of_calls(site.turn.calls, text),
        eid=rollout.eid,
        t=site.t,
        turns=tuple(turn for turn in rollout.turns if turn.index < site.turn.index),
        prompt=tuple(prompt),
        transcript=tuple(transcript) if transcript is not None else None,
        tag=(site.rollout, site.turn.index),
    )


def _score(
    rollout: Rollout, number: int, turn: Turn, policy: Policy, scores: Sequence[Sequence[float | None]] | None
) -> float | None:
    if policy not in ("entropy", "value_gap"):
        return None
    if scores is None:
        return surprisal(rollout, turn)
    return scores[number][turn.index]
