"""Builds the rows of a rollout export from the journal, one turn or one episode in memory at a time."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from errata_protocol.bundle import DeliveryRecord, EpisodeRecord, FailureRecord
from errata_protocol.environment import default_agent_text
from errata_protocol.replay import observation_of
from errata_protocol.rollouts import (
    SCHEMA_VERSION,
    FailedRequest,
    LateReward,
    RolloutEpisode,
    RolloutTurn,
    Turn,
    marker_of,
)

from ..environments.discovery import published
from ..journal.base import HeldEpisode
from ..runtime.store import Store
from .bundles import contents, describe

log = logging.getLogger("errata.export")

PAGE = 500
"""Number of episodes read from the journal at a time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Selects the episodes and fields of an export.

    Args:
        environment: Export only episodes of this environment; None for all.
        since: Export only episodes created at or after this time, seconds since the epoch; None for all.
        done: Export only episodes that ended.
        states: Include payloads.
        agent_text: Include the text that the agent read.
    """

    environment: str | None = None
    since: float | None = None
    done: bool = False
    states: bool = True
    agent_text: bool = False

    def takes(self, held: HeldEpisode) -> bool:
        """Return whether an episode is selected."""
        return (
            self.environment in (None, held.row.environment)
            and (self.since is None or held.row.created >= self.since)
            and (held.done or not self.done)
        )


async def all_held(store: Store) -> AsyncIterator[HeldEpisode]:
    """Yield every episode of a journal, of any owner, oldest first."""
    after = 0
    while page := await store.held(after=after, limit=PAGE):
        for held in page:
            yield held
        after = page[-1].n


async def turn_rows(store: Store, choice: Choice) -> AsyncIterator[RolloutTurn]:
    """Yield a row for each turn of the selected episodes, oldest episode first."""
    texts = _Texts(choice)
    async for held in all_held(store):
        if choice.takes(held):
            record = await describe(store, held.row)
            of_episode = _of_episode(record)
            async for turn in _turns(store, record, choice, texts):
                yield RolloutTurn.model_construct(**of_episode, **dict(turn))
    texts.tell()


async def episode_rows(store: Store, choice: Choice) -> AsyncIterator[RolloutEpisode]:
    """Yield a row for each selected episode, oldest first; one episode is in memory at a time."""
    texts = _Texts(choice)
    async for held in all_held(store):
        if choice.takes(held):
            record = await describe(store, held.row)
            turns = [turn async for turn in _turns(store, record, choice, texts)]
            late = [turn.late_reward_t for turn in turns if turn.late_reward_t is not None]
            yield RolloutEpisode.model_construct(
                **_of_episode(record),
                created=record.created,
                done=any(turn.done for turn in turns),
                reward=sum(turn.reward_t or 0.0 for turn in turns),
                late_reward=sum(late) if late else None,
                turns=turns,
            )
    texts.tell()


async def _turns(store: Store, record: EpisodeRecord, choice: Choice, texts: _Texts) -> AsyncIterator[Turn]:
    late: dict[int, list[LateReward]] = {}
    for reward in await store.rewards(record.eid):
        late.setdefault(reward.t, []).append(
            LateReward(value=reward.value, source=reward.source, reward_id=reward.reward_id)
        )
    delivery: DeliveryRecord | None = None
    errors: list[FailedRequest] = []
    async for line in contents(store, record):
        if isinstance(line, FailureRecord):
            errors.append(_failed(line))
        elif isinstance(line, DeliveryRecord):
            if delivery is not None:
                yield _turn(record, delivery, late.get(delivery.t, []), errors, choice, texts)
            delivery, errors = line, []
    if delivery is not None:
        yield _turn(record, delivery, late.get(delivery.t, []), errors, choice, texts)


def _turn(
    record: EpisodeRecord,
    delivery: DeliveryRecord,
    late: list[LateReward],
    errors: list[FailedRequest],
    choice: Choice,
    texts: _Texts,
) -> Turn:
    needs_payload = delivery.error_kind is not None or choice.agent_text
    payload = json.loads(delivery.payload) if needs_payload else None
    return Turn.model_construct(
        t=delivery.t,
        kind=delivery.kind,
        state_t=delivery.payload if choice.states else None,
        agent_text_t=texts.read(record, delivery, payload) if choice.agent_text else None,
        action_t=delivery.request,
        reward_t=delivery.reward,
        late_rewards_t=late,
        late_reward_t=sum(reward.value for reward in late) if late else None,
        error_marker_t=marker_of(payload) if delivery.error_kind is not None else None,
        done=delivery.done,
        digest=delivery.digest,
        semantic_digest=delivery.semantic_digest,
        errors_t=errors,
        created=delivery.created,
    )


def _failed(line: FailureRecord) -> FailedRequest:
    return FailedRequest(
        kind=line.kind, action=line.request, code=line.code, message=str(json.loads(line.payload).get("message", ""))
    )


def _of_episode(record: EpisodeRecord) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        **record.model_dump(include={"eid", "episode_id", "environment", "session", "agent_text_version"}),
        "origin_eid": record.origin.eid if record.origin is not None else None,
        "origin_t": record.origin.t if record.origin is not None else None,
    }


class _Texts:
    """Renders the text that the agent read, if the environment is installed in the version that delivered it."""

    def __init__(self, choice: Choice) -> None:
        self._installed: dict[str, tuple[str | None, Callable[[Any], str]]] = {}
        self._published = published() if choice.agent_text else {}
        self._missing: dict[str, int] = {}

    def read(self, record: EpisodeRecord, delivery: DeliveryRecord, payload: Any) -> str | None:
        """Return the agent's text of a payload; count it as missing and return None if that cannot be rendered."""
        if delivery.kind == "mcp":
            return None
        name = record.environment
        if name not in self._installed:
            spec = self._published[name].load() if name in self._published else None
            self._installed[name] = (spec.agent_text_version, spec.agent_text) if spec else (None, default_agent_text)
        version, agent_text = self._installed[name]
        if version != record.agent_text_version:
            why = f"{name} with agent_text {record.agent_text_version}, and {version or 'none'} is installed here"
            self._missing[why] = self._missing.get(why, 0) + 1
            return None
        return agent_text(observation_of(payload))

    def tell(self) -> None:
        """Log the texts that were left out."""
        for why, count in self._missing.items():
            log.warning("agent_text_t of %d turns is left out: they were delivered by %s", count, why)
