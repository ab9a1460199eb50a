"""Checks of a server: each opens connections of its own, judges one statement, and leaves nothing behind."""
