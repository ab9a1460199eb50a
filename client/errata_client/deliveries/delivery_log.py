"""`DeliveryLog`: the deliveries that a client received, byte for byte, and its position (eid, t). Answers state(t) for
servers that cannot (PROTOCOL A2)."""

from __future__ import annotations

from collections import OrderedDict

from errata_protocol.errors import InvalidRequest, NoReset, StateOutOfRange, UnknownEpisode
from errata_protocol.replay import StateAt

from ..wire.frames import FrameInvalid
from .read_keys import READ_KEYS

KEPT_EPISODES = 8
"""How many episodes a client keeps, the running one included; the oldest is dropped first."""


class DeliveryLog:
    """The deliveries of the last few episodes, and the position (eid, t) of the session.

    Args:
        kept_episodes: How many episodes are kept.

    Attributes:
        read_key: The session's read key, kept in `READ_KEYS` for each episode that begins; None where none is known.
    """

    def __init__(self, kept_episodes: int = KEPT_EPISODES) -> None:
        self._kept_episodes = kept_episodes
        self._episodes: OrderedDict[str, dict[int, StateAt]] = OrderedDict()
        self._eid: str | None = None
        self._t: int | None = None
        self.read_key: str | None = None

    @property
    def eid(self) -> str | None:
        """The running episode, None before the first delivery."""
        return self._eid

    @property
    def t(self) -> int | None:
        """The last known delivery of the running episode, kept here or not; None without an episode."""
        return self._t

    def note(self, state: StateAt) -> None:
        """Keep a delivery and move to its position.

        Raises:
            FrameInvalid: Its t is not larger than the last one's of the same episode, or it is a reset with t > 0.
        """
        if state.kind == "reset" and state.t != 0:
            raise FrameInvalid(f"the server delivered a reset as t={state.t} of episode {state.eid}, not as t=0")
        if state.eid == self._eid and self._t is not None and state.t <= self._t:
            raise FrameInvalid(f"the server delivered t={state.t} of episode {state.eid} after t={self._t}")
        self.move(state.eid, state.t)
        self._episodes[state.eid][state.t] = state

    def move(self, eid: str, t: int) -> None:
        """Set the position of the session, e.g. after deliveries that this client did not receive."""
        if eid != self._eid:
            self._eid = eid
            if self.read_key is not None:
                READ_KEYS.add(eid, self.read_key)
            self._episodes.setdefault(eid, {})
            self._episodes.move_to_end(eid)
            while len(self._episodes) > self._kept_episodes:
                self._episodes.popitem(last=False)
        self._t = t

    def end_episode(self) -> None:
        """Set the position to none: no episode is running. Its deliveries are kept."""
        self._eid = self._t = None

    def add(self, states: list[StateAt]) -> None:
        """Keep deliveries without changing the position, e.g. those of a fork's parent."""
        for state in states:
            self._episodes.setdefault(state.eid, {})[state.t] = state

    def get(self, eid: str, t: int) -> StateAt | None:
        """Return a kept delivery, or None."""
        return self._episodes.get(eid, {}).get(t)

    def kept(self, eid: str) -> list[StateAt]:
        """Return the kept deliveries of an episode in order of t; empty for an unknown episode."""
        return [state for _, state in sorted(self._episodes.get(eid, {}).items())]

    def is_complete(self, eid: str) -> bool:
        """Return whether ``eid`` is the running episode and all its deliveries are kept, from t=0 on."""
        kept = self._episodes.get(eid, {})
        return eid == self._eid and self._t is not None and all(t in kept for t in range(self._t + 1))

    def lookup(self, t: int, eid: str | None = None) -> StateAt:
        """Return a kept delivery, with the errors that a server would answer.

        Args:
            t: Delivery index.
            eid: Episode; None is the running one.

        Raises:
            InvalidRequest: ``t`` is not an integer.
            NoReset: No episode is running, or it began without a reset and t=0 has no payload.
            UnknownEpisode: The episode was not received by this client, or is no longer kept.
            StateOutOfRange: The episode has no delivery ``t``.
        """
        if type(t) is not int:
            raise InvalidRequest(f"t is {t!r}: give the index of a delivery, 0 for the reset's")
        if eid is None:
            if self._eid is None:
                raise NoReset("no episode is running here: call reset() first, or name an eid")
            eid = self._eid
        if eid not in self._episodes:
            raise UnknownEpisode(eid)
        kept = self._episodes[eid]
        if t in kept:
            return kept[t]
        if t == 0 and kept:
            raise NoReset(f"episode {eid} began without a reset: it has no reset payload, ask for t >= 1")
        raise StateOutOfRange(eid, t, max(kept, default=-1) + 1)
