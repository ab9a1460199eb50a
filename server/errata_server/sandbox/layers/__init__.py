"""The overlay layers of snapshots and forks: stored, chained, flattened and deleted.

This package does not know which step needs which layer; the journal does.
"""
