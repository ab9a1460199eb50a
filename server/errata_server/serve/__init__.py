"""One server process: uvicorn with Errata's HTTP and WebSocket protocols, binding, signals, drain and shutdown.

Routes and messages belong to `doors`. `errata_server.process` starts such a process from another one.
"""
