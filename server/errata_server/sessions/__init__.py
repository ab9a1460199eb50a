"""Opens, runs, hibernates, restores and closes sessions. Requests of a session run one at a time, each to its commit.

Doors open and find sessions through `Sessions`, close and expire them through its `lifetime`, and run requests through
its `delivery`. Not here: wire formats (`doors`), finished episodes (`episodes`), calls of an
environment and their threads (`environments`, `concurrency`).
"""
