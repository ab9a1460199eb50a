"""The multiplexed WebSocket: many sessions on one socket, resumable (PROTOCOL D).

`errata_protocol.mux` is a state machine without I/O, which decides what is admitted, in which order, and what is
answered. This package does the I/O that it asks for: `socket` reads and writes frames, `driver` feeds the machine and
performs its effects, `requests`, `reads`, `lookup` and `lifetime` each handle some of them, `translation` decodes
requests, `detached` keeps sessions without a socket, `multiplexer` connects all.
"""
