"""Counts environment instances against the limits of an environment and of a principal (the holder of a token)."""

from __future__ import annotations

from typing import Literal

from errata_protocol.errors import CapacityReached

RETRY_AFTER_S = 5.0
"""What a client that found no room is told to wait, seconds."""


class Room:
    """How many environment instances there may be and are.

    Args:
        capacity: Upper bound of `used`; None for sessions that are not counted.
    """

    __slots__ = ("capacity", "used")

    def __init__(self, capacity: int | None) -> None:
        self.capacity = capacity
        self.used = 0

    @property
    def full(self) -> bool:
        """No further session may get an instance."""
        return self.capacity is not None and self.used >= self.capacity

    def freed_by(self, other: Room) -> bool:
        """Return whether an instance less in ``other`` is one less here."""
        return other is self

    @property
    def full_of(self) -> Literal["environment", "principal"]:
        """Whose bound it is that is reached."""
        return "environment"

    def refusal(self, *, takes_several: bool, soon_free: bool) -> CapacityReached:
        """Return what a client is told that found no room.

        Args:
            takes_several: The environment class allows several instances (``SUPPORTS_CONCURRENT_SESSIONS``).
            soon_free: A session that nobody speaks for gives its instance up when its request ends.

        Returns:
            With ``retry_after`` where it helps to wait: not for the one instance that another client has.
        """
        if takes_several:
            remedy = "close one, or raise max_concurrent_envs (errata serve --max-sessions)"
        else:
            remedy = (
                "the environment class does not say SUPPORTS_CONCURRENT_SESSIONS = True, so there is one instance at a "
                "time: close the session that has it first (of a fork, the parent)"
            )
        return CapacityReached(
            f"Server at capacity: {self.used}/{self.capacity} sessions active; {remedy}",
            active_sessions=self.used,
            max_sessions=self.capacity,
            **({"retry_after": RETRY_AFTER_S} if soon_free or self.capacity != 1 else {}),
        )


class Share(Room):
    """A place among all sessions of an environment that also counts among those of its principal.

    Args:
        whole: All sessions of the environment.
        owners: Those of the principal, of whichever environment.
    """

    __slots__ = ("owners", "whole")

    def __init__(self, whole: Room, owners: Room) -> None:
        self.whole = whole
        self.owners = owners

    @property
    def used(self) -> int:  # type: ignore[override]
        """Instances of the environment."""
        return self.whole.used

    @used.setter
    def used(self, used: int) -> None:
        taken = used - self.whole.used
        self.whole.used += taken
        self.owners.used += taken

    @property
    def capacity(self) -> int | None:  # type: ignore[override]
        """Upper bound of `used`."""
        return self.whole.capacity

    @property
    def full(self) -> bool:
        """The environment or the principal may have no further instance."""
        return self.whole.full or self.owners.full

    def freed_by(self, other: Room) -> bool:
        """Return whether an instance less in ``other`` is one less where this one is full."""
        if not isinstance(other, Share):
            return False
        return other.owners is self.owners if self.owners.full else other.whole is self.whole

    @property
    def full_of(self) -> Literal["environment", "principal"]:
        """Whose bound it is that is reached."""
        return "principal" if self.owners.full else "environment"

    def refusal(self, *, takes_several: bool, soon_free: bool) -> CapacityReached:
        """Return what a client is told that found no room: see `Room.refusal`."""
        if not self.owners.full:
            return super().refusal(takes_several=takes_several, soon_free=soon_free)
        return CapacityReached(
            f"this principal is at its capacity: {self.owners.used}/{self.owners.capacity} sessions active; close "
            "one, or raise ERRATA_MAX_SESSIONS_PER_PRINCIPAL (errata serve --max-sessions-per-principal)",
            active_sessions=self.owners.used,
            max_sessions=self.owners.capacity,
            retry_after=RETRY_AFTER_S,
        )
