"""The protocols that clients speak: HTTP routes, plain and MCP WebSockets, JSON-RPC; `mux` is the multiplexed socket.

A *door* is the server's side of one protocol: it checks who may, decodes requests, calls `sessions` or `episodes`, and
encodes replies. How long a session lives and how its steps are run and committed is decided in `sessions`. Requests
that are no step commit their own rows: `injected_state`, and in `mux` `requests` (forks, errors), `reads` (close_group)
and `lifetime` (expiry).
"""
