"""The suites that `make test` and `.ci/run` run: which tests each has, in which tier, and what its outcome depends on.

``suites.toml`` is the table. A suite of tier 3 is skipped while nothing that it depends on has changed since it passed
in ``.ci/run``. ``python -m tests.suites`` runs them.
"""
