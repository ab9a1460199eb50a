"""The broker ``errata sandboxd``: the only process that uses the container engine's socket.

It accepts a fixed list of requests over a unix socket, for containers with one label only. It imports the standard
library and the docker SDK.
"""
