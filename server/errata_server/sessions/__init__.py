"""The life of a session and its requests, one at a time and each to its commit: open, reset, step, close, recovery.

Doors speak to `Sessions` alone. No bytes of a client are read here (`doors`), and no thread is managed (`concurrency`).
"""
