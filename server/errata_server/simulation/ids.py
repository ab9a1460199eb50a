"""Ids drawn from a seed: the same in every run."""

from __future__ import annotations

import random
import uuid

from errata_protocol.shards import named

from ..ids import Ids


class SeededIds(Ids):
    """Makes ids from a random number generator; they are predictable and so not secret.

    Args:
        chance: The seeded generator.
        shard: Name of the data directory, None where it has none.
    """

    def __init__(self, chance: random.Random, shard: str | None = None) -> None:
        self._chance = chance
        self.shard = shard

    def uuid(self) -> str:
        return str(uuid.UUID(int=self._chance.getrandbits(128), version=4))

    def episode(self) -> str:
        return "ep_" + named(self.shard, f"{self._chance.getrandbits(144):036x}")

    def seed(self) -> int:
        return self._chance.getrandbits(31)

    def salt(self) -> bytes:
        return self._chance.randbytes(8)
