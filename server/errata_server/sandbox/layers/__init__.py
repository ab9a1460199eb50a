"""The overlay layers that snapshots and forks are made of: stored, chained, flattened, collected.

Which step needs which layer is the journal's knowledge; this package stores and removes them.
"""
