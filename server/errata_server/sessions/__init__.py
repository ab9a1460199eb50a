"""The life of a session and its requests, in order and each to its commit: open, reset, step, close, recovery."""
