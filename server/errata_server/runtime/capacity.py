"""Limits of environment instances, for an environment and for a principal (the holder of a token), and of the bytes of
unfinished messages of a principal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from errata_protocol.errors import CapacityReached
from errata_protocol.mux import Allowance

RETRY_AFTER_S = 5.0
"""After how long a client that was refused for lack of capacity should try again, seconds."""


class Capacity:
    """A limit on environment instances, and how many of them are in use.

    Args:
        limit: Upper bound of `used`; None for sessions that are not counted.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = 0

    @property
    def in_use(self) -> int:
        """Instances that count against the limit: those of all processes, where several share it."""
        return self.used

    @property
    def full(self) -> bool:
        """No further session may get an instance."""
        return self.limit is not None and self.in_use >= self.limit

    def freed_by(self, other: Capacity) -> bool:
        """Return whether closing an instance that is counted in ``other`` lowers `used` here."""
        return other is self

    @property
    def full_of(self) -> Literal["environment", "principal"]:
        """Whose limit is reached."""
        return "environment"

    def refusal(self, *, takes_several: bool, soon_free: bool) -> CapacityReached:
        """Return the error for a client that gets no instance.

        Args:
            takes_several: The environment class allows several instances (``SUPPORTS_CONCURRENT_SESSIONS``).
            soon_free: A detached session gives its instance up when its request ends.

        Returns:
            An error with ``retry_after`` where it helps to wait: not for the one instance that another client has.
        """
        if takes_several:
            remedy = "close one, or raise max_concurrent_envs (errata serve --max-sessions)"
        else:
            remedy = (
                "the environment class does not say SUPPORTS_CONCURRENT_SESSIONS = True, so there is one instance at a "
                "time: close the session that has it first (of a fork, the parent)"
            )
        return CapacityReached(
            f"Server at capacity: {self.in_use}/{self.limit} sessions active; {remedy}",
            active_sessions=self.in_use,
            max_sessions=self.limit,
            **({"retry_after": RETRY_AFTER_S} if soon_free or self.limit != 1 else {}),
        )


class SharedCapacity(Capacity):
    """The capacity of an environment for one principal: an instance counts against both limits.

    Args:
        whole: The limit of the environment.
        owners: The limit of the principal, over all environments.
    """

    __slots__ = ("owners", "whole")

    def __init__(self, whole: Capacity, owners: Capacity) -> None:
        self.whole = whole
        self.owners = owners

    @property
    def used(self) -> int:
        """Instances of the environment."""
        return self.whole.used

    @used.setter
    def used(self, used: int) -> None:
        taken = used - self.whole.used
        self.whole.used += taken
        self.owners.used += taken

    @property
    def in_use(self) -> int:
        """Instances of the environment that count against its limit."""
        return self.whole.in_use

    @property
    def limit(self) -> int | None:  # type: ignore[override]
        """Upper bound of `used`."""
        return self.whole.limit

    @property
    def full(self) -> bool:
        """The environment or the principal may have no further instance."""
        return self.whole.full or self.owners.full

    def freed_by(self, other: Capacity) -> bool:
        """Return whether closing an instance that is counted in ``other`` lowers the count that is at its limit here.

        That count is the principal's if it is at its limit, and otherwise the environment's.
        """
        if not isinstance(other, SharedCapacity):
            return False
        return other.owners is self.owners if self.owners.full else other.whole is self.whole

    @property
    def full_of(self) -> Literal["environment", "principal"]:
        """Whose limit is reached."""
        return "principal" if self.owners.full else "environment"

    def refusal(self, *, takes_several: bool, soon_free: bool) -> CapacityReached:
        """Return the error for a client that gets no instance; see `Capacity.refusal`."""
        if not self.owners.full:
            return super().refusal(takes_several=takes_several, soon_free=soon_free)
        return CapacityReached(
            f"this principal is at its capacity: {self.owners.in_use}/{self.owners.limit} sessions active; close "
            "one, or raise ERRATA_MAX_SESSIONS_PER_PRINCIPAL (errata serve --max-sessions-per-principal)",
            active_sessions=self.owners.in_use,
            max_sessions=self.owners.limit,
            retry_after=RETRY_AFTER_S,
        )


class PrincipalQuotas:
    """The limits of each principal, over all environments of a data directory.

    Args:
        max_sessions: Environment instances of one principal; None for no limit.
        max_unfinished_bytes: Bytes of one principal's messages that have not arrived whole.
        shared: Returns the capacity of a principal that several processes share, given the limit; None for one process.
    """

    def __init__(
        self,
        max_sessions: int | None,
        max_unfinished_bytes: int,
        shared: Callable[[str | None, int | None], Capacity] | None = None,
    ) -> None:
        self._max_sessions = max_sessions
        self._shared = shared
        self._max_unfinished_bytes = max_unfinished_bytes
        self._instances: dict[str | None, Capacity] = {}
        self._unfinished: dict[str | None, Allowance] = {}

    def instances(self, principal: str | None) -> Capacity:
        """Return the limit of a principal's environment instances."""
        found = self._instances.get(principal)
        if found is None:
            limit = self._max_sessions
            found = Capacity(limit) if self._shared is None else self._shared(principal, limit)
            self._instances[principal] = found
        return found

    def unfinished(self, principal: str | None) -> Allowance:
        """Return the limit of a principal's unfinished messages, over all its sockets."""
        return self._unfinished.setdefault(principal, Allowance(self._max_unfinished_bytes))
