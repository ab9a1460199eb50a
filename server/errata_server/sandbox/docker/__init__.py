"""The docker backend: a session is a container, a layer is a committed image, and all of it goes through the broker
`errata sandboxd` (docs/sandboxd.md); the server never has the engine's socket.
"""
