"""`DelayedRewards`: late scores arrive on a Monarch channel, are posted to the server, and are read by the trainer::

rewards = DelayedRewards(url)
judge.score.broadcast(eid, t, rewards.port)                      # its actor sends a LateScore when it has one
scores = rewards.collect([eid], source="judge", deadline_s=60)   # from the server, with what others have posted
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from errata_client import Episodes
from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.replay import RewardPost

from .supervision import channel

__all__ = ["DelayedRewards", "LateScore"]

log = logging.getLogger("errata.trainer")

_POSTING_S = 30.0
_CLOSING_S = 15.0


@dataclass(frozen=True, slots=True)
class LateScore:
    """A score that a delivery gets later, from an actor that has the port.

    Attributes:
        eid: Key of the episode.
        t: Delivery that is scored.
        value: The score.
        source: Name of the judge.
        reward_id: Id of the score: the same one sent again is the same reward.
    """

    eid: str
    t: int
    value: float
    source: str
    reward_id: str


class DelayedRewards:
    """Takes late scores from a channel, posts each to the server's journal, and gives a trainer what is there.

    Args:
        url: URL of the environment.
        headers: Headers of each request as pairs.

    Attributes:
        port: Port that takes `LateScore`, in any process: hand it to actors.
    """

    def __init__(self, url: str, headers: Sequence[tuple[str, str]] = ()) -> None:
        self._url, self._headers = url, dict(headers)
        self._counts: Counter[str] = Counter()
        self._posted: set[tuple[str, str]] = set()
        self._changed = threading.Condition()
        self._refused: InvalidRequest | None = None
        self.port, self._received = channel()
        self._loop = asyncio.new_event_loop()
        self._receiving = self._loop.create_task(self._receive())
        self._thread = threading.Thread(target=self._serve, name="delayed-rewards", daemon=True)
        self._thread.start()

    def collect(self, eids: Sequence[str], *, source: str, deadline_s: float) -> dict[str, float | None]:
        """Read late rewards from the server, and return the sum of those with one source for each episode.

        Rewards count that others posted with this source, too.

        Args:
            eids: Keys of the episodes.
            source: Source of the rewards.
            deadline_s: Longest wait in seconds for the scores of these episodes.

        Returns:
            The sum of each episode; None for one without a score by then, which is counted (``missing``) and is no
            reward.

        Raises:
            InvalidRequest: A score was refused: an error of the judge.
            ErrataError: The server's rewards cannot be read.
        """
        wanted = {(eid, source) for eid in eids}
        with self._changed:
            self._changed.wait_for(lambda: self._refused is not None or wanted <= self._posted, deadline_s)
            if self._refused is not None:
                raise self._refused
        read = asyncio.run_coroutine_threadsafe(self._read(eids, source), self._loop)
        found = read.result(deadline_s + _POSTING_S)
        with self._changed:
            self._counts["missing"] += sum(value is None for value in found.values())
        return found

    def metrics(self) -> dict[str, float]:
        """Return counts since the start: ``rewards/posted`` and ``rewards/not_posted``, scores; ``rewards/missing``,
        episodes without a score at their deadline."""
        with self._changed:
            return {f"rewards/{name}": float(count) for name, count in sorted(self._counts.items())}

    def close(self) -> None:
        """Take no more scores. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._receiving.cancel)
            self._thread.join(_CLOSING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # On the loop of the thread from here on.

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._receiving)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _receive(self) -> None:
        self._episodes = Episodes(self._url, headers=self._headers or None)
        try:
            while True:
                await self._post(await self._received.recv())
        finally:
            await self._episodes.aclose()

    async def _post(self, score: Any) -> None:
        outcome = "not_posted"
        try:
            if not isinstance(score, LateScore):
                raise InvalidRequest(f"the port of delayed rewards takes a LateScore, not {type(score).__name__}")
            post = RewardPost(t=score.t, value=score.value, source=score.source, reward_id=score.reward_id)
            async with asyncio.timeout(_POSTING_S):
                await self._episodes.post_rewards(score.eid, [post])
            outcome = "posted"
        except InvalidRequest as error:
            self._refused = error
        except (ErrataError, ConnectionError, TimeoutError) as error:
            log.warning("a late score was not posted: %s", error)
        with self._changed:
            self._counts[outcome] += 1
            if outcome == "posted":
                self._posted.add((score.eid, score.source))
            self._changed.notify_all()

    async def _read(self, eids: Sequence[str], source: str) -> dict[str, float | None]:
        found: dict[str, float | None] = {}
        for eid in eids:
            values = [one.value for one in await self._episodes.rewards(eid) if one.source == source]
            found[eid] = sum(values) if values else None
        return found
