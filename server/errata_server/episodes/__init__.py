"""Reads, forks, exports, deletes and retains episodes: what works on journal rows, without an environment instance.

A *delivery* is a committed reply, numbered t in its episode. Not here: running requests (`sessions`), routes (`doors`),
the format on disk (`journal`), late rewards (`runtime`).
"""
