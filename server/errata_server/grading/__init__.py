"""Grading a final state where no command of the agent can take part: what every environment with a verifier needs.

`forks` runs commands in forks of a snapshot, `results` reads what they print, `staging` has the files that they read,
and `control` holds the rule by which a run without a verdict is the agent's doing or the machine's.
"""
