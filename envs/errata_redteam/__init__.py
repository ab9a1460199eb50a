"""``errata redteam``: attempts to be rewarded without the work, played on the tasks and instances of their author.

The corpus is data: `attempt` says what an attempt is, `repositories` and `adaptive` have those in repositories of
SWE-bench's form, `workspaces` those in the work directories of terminal tasks, `honest` the honest work that must be
paid. `instances` and `tasks` play them, `campaign` plays all of them on a target and counts, `cli` is the command.
Nothing imports this package but tests.
"""

from .attempt import CORPUS_DATE, CORPUS_VERSION, Attempt

__all__ = ["CORPUS_DATE", "CORPUS_VERSION", "Attempt"]
