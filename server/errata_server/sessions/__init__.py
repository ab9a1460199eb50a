"""Opens, runs, hibernates, restores and closes sessions. Requests of a session run one at a time, each to its commit.

Doors speak to `Sessions` alone. Not here: wire formats (`doors`), finished episodes (`episodes`), calls of an
environment and their threads (`environments`, `concurrency`).
"""
