"""Rewards that come after their step (PROTOCOL D8, F4): pushed on multiplexed sockets, read anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from .frames import FrameInvalid


@dataclass(frozen=True, slots=True)
class Reward:
    """A value that somebody gave a delivery later. It stands beside the step's own reward and never replaces it.

    Args:
        eid: Episode.
        t: Delivery that it is for.
        value: The reward.
        source: Who gave it.
        reward_id: Its name; the same one is the same reward.
    """

    eid: str
    t: int
    value: float
    source: str
    reward_id: str


def read_reward(data: Any, eid: str | None = None) -> Reward:
    """Return the reward that a server sent.

    Args:
        data: Decoded; HTTP leaves ``eid`` out.
        eid: The episode that was asked for.

    Raises:
        FrameInvalid: It is none.
    """
    match data:
        case {"t": int(t), "value": float() | int() as value, "source": str(source), "reward_id": str(reward_id)}:
            episode = data.get("eid", eid)
            if isinstance(episode, str):
                return Reward(episode, t, float(value), source, reward_id)
    raise FrameInvalid(f"the server sent no valid reward: {data!r:.200}")


def read_rewards(payload: bytes | list[Any], eid: str | None = None) -> list[Reward]:
    """Return the rewards of a reply.

    Raises:
        FrameInvalid: It is no list of rewards.
    """
    try:
        found = msgspec.json.decode(payload) if isinstance(payload, bytes) else payload
    except msgspec.DecodeError as error:
        raise FrameInvalid(f"the server's rewards cannot be read: {error}") from error
    if not isinstance(found, list):
        raise FrameInvalid(f"the server sent rewards that are no list: {found!r:.200}")
    return [read_reward(data, eid) for data in found]
