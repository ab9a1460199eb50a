"""Walks, counts, packs and removes file trees of sandboxes on the host, also where file modes deny access.

It knows nothing of sessions, of layers on disk or of mounts.
"""
