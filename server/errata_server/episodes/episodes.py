"""`Episodes`: the reads, forks and deletion of one data directory in one object, for the doors and the command line."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime.runtime import Runtime
from .agent_texts import AgentTexts
from .deletion import Deletion
from .forks import Forks
from .reads import JournalReads


@dataclass(frozen=True, slots=True)
class Episodes:
    """Reads, forks and deletion of the episodes of one data directory."""

    reads: JournalReads
    forks: Forks
    deletion: Deletion

    @classmethod
    def of(cls, runtime: Runtime) -> Episodes:
        """Create the reads, forks and deletion of a runtime."""
        reads = JournalReads(runtime.store, AgentTexts(runtime.specs), runtime.attached.now)
        return cls(reads, Forks(runtime.store, runtime.ids, runtime.clock), Deletion(runtime))
