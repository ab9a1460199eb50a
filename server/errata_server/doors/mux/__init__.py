"""The multiplexed WebSocket: many sessions on one socket, resumable.

`errata_protocol.mux` is the state machine, which decides; this package does the I/O that the machine asks for.
"""
