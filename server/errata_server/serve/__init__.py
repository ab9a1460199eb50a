"""The server process: uvicorn with Errata's HTTP and WebSocket protocols, listening, signals, drain and shutdown.

Routes and messages belong to `doors`. `errata_server.process` starts a server as a child process.
"""
