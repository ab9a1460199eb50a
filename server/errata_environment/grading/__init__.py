"""Tools to grade a final state of a sandbox so that no process of the agent can interfere; for environments' verifiers.

`forks` runs commands in forks of a snapshot, `results` parses what they print, `staging` copies the files that they
read, and `control` grades the untouched start state, to distinguish a broken verifier from a run that the agent broke.
"""
