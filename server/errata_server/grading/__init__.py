"""Tools to grade a final state of a sandbox so that no process of the agent can interfere; for environments' verifiers.

`forks` runs commands in forks of a snapshot, `results` parses what they print, `staging` copies the files that they
read, and `control` decides whether a run without a verdict is the agent's fault or the machine's.
"""
