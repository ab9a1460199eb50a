"""``errata tasks check``: whether a task rewards its solution, and nothing else, on this machine.

`checker` runs a task's verifier on states whose worth is known, `degenerate` has the programs that must earn nothing,
`results` keeps what was found, and says at reset whether a task may be served. `cli` is the command.
"""
