"""The ways to a session on a server: over a multiplexed socket, over a plain one, and over HTTP."""
