"""Threads that run calls, deadlines, queues and the fair lock of a session.

How a call leaves the event loop and how its result comes back. Knows nothing of sessions, environments or the journal.
"""
