"""Functions on file trees of sandboxes: walk, count, pack and remove them, read and merge overlayfs layers, compute
digests; also where file modes deny access.

They know nothing of sessions or of mounts.
"""
