"""Threads for blocking calls, deadlines, queues, a first come, first served lock, and procedures, across event loops.

A procedure is a generator that runs with callbacks or in a task. Imports nothing of sessions, environments or the
journal.
"""
