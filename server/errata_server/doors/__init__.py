"""The protocols clients speak: bytes to requests, replies to bytes. A door holds no session state.

HTTP routes, the plain and the MCP WebSocket, JSON-RPC, and what guards them; `mux` is the multiplexed WebSocket.
"""
