"""Multiplexed connections: one socket for the sessions of many clients, opened again when it is lost."""
