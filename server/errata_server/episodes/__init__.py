"""Reads, forks, exports and deletion of what was delivered: everything that works on journal rows without a session."""
