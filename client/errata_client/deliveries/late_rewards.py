"""`Reward`: a late reward (PROTOCOL D8, F4), posted after its step, and its parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ..wire.frames import FrameInvalid


@dataclass(frozen=True, slots=True)
class Reward:
    """A late reward of a delivery. It is kept beside the step's own reward and never replaces it.

    Args:
        eid: Episode.
        t: The delivery that is rewarded.
        value: The reward.
        source: Who posted it.
        reward_id: Its id in the episode.
    """

    eid: str
    t: int
    value: float
    source: str
    reward_id: str


def read_reward(data: Any, eid: str | None = None) -> Reward:
    """Parse a reward that a server sent.

    Args:
        data: The decoded reward.
        eid: Its episode, where ``data`` has no ``eid``, as over HTTP.

    Raises:
        FrameInvalid: It is no reward.
    """
    match data:
        case {"t": int(t), "value": float() | int() as value, "source": str(source), "reward_id": str(reward_id)}:
            episode = data.get("eid", eid)
            if isinstance(episode, str):
                return Reward(episode, t, float(value), source, reward_id)
    raise FrameInvalid(f"the server sent no valid reward: {data!r:.200}")


def read_rewards(payload: bytes | list[Any], eid: str | None = None) -> list[Reward]:
    """Parse the list of rewards in a reply; the arguments are those of `read_reward`.

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
