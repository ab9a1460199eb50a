"""The protocols that clients speak: HTTP routes, plain and MCP WebSockets, JSON-RPC; `mux` is the multiplexed socket.

A *door* is the server's side of one protocol: it checks who may, decodes requests, calls `sessions` or `episodes`, and
encodes replies. The life of a session, the order of its requests and their commits belong in `sessions`.
"""
