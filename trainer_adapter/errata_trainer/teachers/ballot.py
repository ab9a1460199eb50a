"""What a `TeacherPool` is asked, and what it returns: a state, the votes there, and the resulting preferences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from errata_protocol.replay import RewardPost

from ..rollouts.rollout import Turn
from .actions import Action, KeyedAction
from .votes import Vote

SOURCE = "teachers"
"""The source of rewards that votes are posted as."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A state to ask teachers about.

    Attributes:
        student: Action that the student took at the state; None if it could not be parsed.
        eid: Key of the episode in the server's journal; None without one.
        t: Delivery whose payload is the state.
        turns: The student's turns before the state.
        prompt: The student's messages before the episode.
        transcript: The conversation up to the state, its prompt included, read where the journal cannot be; None
            without one.
        cwd: Working directory at the state, for reading actions in a transcript; a journal tells it by itself.
        tag: Value for the caller's own use; the pool does not read it.
    """

    student: Action | None
    eid: str | None = None
    t: int | None = None
    turns: tuple[Turn, ...] = ()
    prompt: tuple[Mapping[str, Any], ...] = ()
    transcript: tuple[Mapping[str, Any], ...] | None = None
    cwd: str | None = None
    tag: Any = None


@dataclass(frozen=True, slots=True)
class Ballot:
    """The votes at one state.

    Attributes:
        ask: The question that was voted on.
        vote: The outcome. Beside the reasons of `vote` a state can be skipped for ``no_state`` (nothing that a teacher
            could read), ``queue_full``, ``deadline`` (before a teacher was asked) and ``closed``.
        student: The student's action with its key; None if it could not be parsed or nothing was asked.
        actions: Each teacher's usable answer, by its name.
        failures: Reason of each teacher without a usable answer, by its name.
        source: Source of what the teachers read: ``agent_text`` or ``transcript``; empty if none was asked.
    """

    ask: Ask
    vote: Vote[KeyedAction]
    student: KeyedAction | None = None
    actions: Mapping[str, KeyedAction] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    source: str = ""

    @property
    def votes(self) -> dict[str, str | None]:
        """The key of each teacher's action, None for teachers without one; as in `errata_trainer.DpoPair.votes`."""
        keys = {name: action.key for name, action in self.actions.items()}
        return {**keys, **dict.fromkeys(self.failures)}

    @property
    def margin(self) -> float:
        """Share of the votes for the student's action, minus that of the most chosen other one: -1 to 1."""
        if not self.actions:
            return 0.0
        counts: dict[str, int] = {}
        for action in self.actions.values():
            counts[action.key] = counts.get(action.key, 0) + 1
        own = counts.pop(self.student.key, 0) if self.student is not None else 0
        return (own - max(counts.values(), default=0)) / len(self.actions)


@dataclass(frozen=True, slots=True)
class Preference:
    """A preferred and a rejected action, to be rendered in the student's own format.

    Attributes:
        chosen: Action that the teachers agreed on, in the form of one of them. Render its `message_of` with the
            student's chat template after the state's exact tokens.
        rejected: Action that the student took; None if it could not be parsed. The student's own tokens are to be used.
        weight: Weight of the pair in the loss.
        eid: Key of the episode; None without a journal.
        t: Delivery whose payload is the state.
        votes: Key of each teacher's action, None for one without, by the teacher's name.
        tag: The `tag` of the question that was voted on.
    """

    chosen: Action
    rejected: Action | None
    weight: float
    eid: str | None
    t: int | None
    votes: Mapping[str, str | None]
    tag: Any = None


def preferences(ballot: Ballot) -> tuple[Preference, ...]:
    """Return the preferences of a vote; empty if the state was skipped."""
    ask = ballot.ask
    return tuple(
        Preference(pair.chosen.raw, ask.student, pair.weight, ask.eid, ask.t, ballot.votes, ask.tag)
        for pair in ballot.vote.pairs
    )


def message_of(action: Action, *, with_text: bool = False) -> dict[str, Any]:
    """Return an action as an assistant message with arguments as an object, for a chat template.

    Args:
        action: Action to render: tool calls or a final answer.
        with_text: Keep the text beside tool calls. It is style, not the choice.
    """
    if not action.calls:
        return {"role": "assistant", "content": action.text}
    calls = [{"type": "function", "function": {"name": c.name, "arguments": dict(c.arguments)}} for c in action.calls]
    return {"role": "assistant", "content": action.text if with_text else "", "tool_calls": calls}


def reward_post(ballot: Ballot) -> RewardPost | None:
    """Return the votes at a state as a late reward of its delivery; None without votes or without a journal.

    Its value is `Ballot.margin`. Its id tells the outcome and depends on the votes: the same vote is the same reward.
    """
    ask = ballot.ask
    if ask.eid is None or ask.t is None or not ballot.actions:
        return None
    content = json.dumps(
        [ballot.student.key if ballot.student is not None else None, sorted(ballot.votes.items())], sort_keys=True
    )
    digest = hashlib.sha256(content.encode()).hexdigest()[:16]
    outcome = f"{ballot.vote.reason}:{ballot.vote.top}of{ballot.vote.n_valid}"
    return RewardPost(t=ask.t, value=ballot.margin, source=SOURCE, reward_id=f"{SOURCE}:{ask.t}:{outcome}:{digest}")
