"""Reads, forks, exports, deletion and retention of episodes: what works on journal rows alone.

Nothing here needs a live session or an environment instance; what does belongs to `sessions`.
"""
