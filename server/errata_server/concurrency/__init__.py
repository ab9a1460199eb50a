"""Threads for blocking calls, deadlines, bounded queues and a fair lock, across event loops.

Knows nothing of sessions, environments or the journal.
"""
