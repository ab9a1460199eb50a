"""Checks of a server. Each check opens its own connections, checks one statement, and closes what it opened."""
