"""``errata tasks check``: whether a task rewards its solution, and nothing else, on this machine.

`checker` runs a task's verifier on states with a known score, `degenerate` has programs that must score 0, `results`
stores the results and decides at reset whether a task may be served. `cli` is the command.
"""
