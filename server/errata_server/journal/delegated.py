"""`DelegatedReads`: base class of the journals whose reads are answered by another object."""

from __future__ import annotations

import functools
import operator
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from .base import Journal, Reads

P = ParamSpec("P")
R = TypeVar("R")


def _delegated(read: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method with the signature of ``read`` that calls the method of this name of the delegate."""
    name = read.__name__

    @functools.wraps(read, updated=())  # not the mark of an abstract method
    def delegated(self: DelegatedReads, /, *args: P.args, **kwargs: P.kwargs) -> R:
        answer: R = self._ask(operator.methodcaller(name, *args, **kwargs))
        return answer

    return delegated


class DelegatedReads(Journal):
    """A journal that has a `Reads` which knows the answers."""

    @abstractmethod
    def _ask(self, read: Callable[[Reads], R]) -> R:
        """Return ``read(reads)``, where ``reads`` sees everything that was committed before this call."""

    delivery = _delegated(Reads.delivery)
    recorded = _delegated(Reads.recorded)
    last_delivery = _delegated(Reads.last_delivery)
    replies = _delegated(Reads.replies)
    last_id = _delegated(Reads.last_id)
    rewards = _delegated(Reads.rewards)
    pushes = _delegated(Reads.pushes)
    last_seq = _delegated(Reads.last_seq)
    episode = _delegated(Reads.episode)
    first_episode = _delegated(Reads.first_episode)
    session_episodes = _delegated(Reads.session_episodes)
    turns = _delegated(Reads.turns)
    deliveries = _delegated(Reads.deliveries)
    late_rewards = _delegated(Reads.late_rewards)
    episodes = _delegated(Reads.episodes)
    aggregates = _delegated(Reads.aggregates)
    episode_stats = _delegated(Reads.episode_stats)
    held = _delegated(Reads.held)
    session = _delegated(Reads.session)
    open_sessions = _delegated(Reads.open_sessions)
    fork_session = _delegated(Reads.fork_session)
    refs = _delegated(Reads.refs)
