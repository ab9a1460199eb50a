"""File trees of sandboxes on the host: walked, counted, packed, removed, also where their modes forbid it.

Knows nothing of sessions, layers on disk or mounts.
"""
