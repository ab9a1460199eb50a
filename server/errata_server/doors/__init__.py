"""The protocols that clients speak: HTTP routes, plain and MCP WebSockets, JSON-RPC; `mux` is the multiplexed socket.

A door turns bytes into requests and replies into bytes, and checks who may. It holds no state of a session.
"""
