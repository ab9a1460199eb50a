"""Worker processes for work whose size an agent, a task author or a client chooses, each call within a budget.

Such work never runs on the event loop, and not in a thread either: a thread that computes holds the interpreter's lock.
`pool` starts the processes and divides them fairly, `child` is the program that they run. Imports nothing of sessions
or environments; what is called here is a function of a module, whose arguments and result can be pickled.
"""

from .pool import DEFAULT, MOST_WORKERS, WORKERS, Budget, BudgetExceeded, WorkerFailed, WorkerPool

__all__ = ["DEFAULT", "MOST_WORKERS", "WORKERS", "Budget", "BudgetExceeded", "WorkerFailed", "WorkerPool"]
