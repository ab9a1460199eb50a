"""The suites that `make test` and `.ci/run` run: which tests each has, in which tier, and what its outcome depends on.

``suites.toml`` is the table. ``.ci/run`` skips a suite while nothing that it depends on has changed since it passed
there. ``python -m tests.suites`` runs them.
"""
