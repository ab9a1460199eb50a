"""Two programs of the operator: the broker ``errata sandboxd``, and ``errata image``, which adds images.

Only they have the container engine's socket; a server process has the broker's. The broker accepts a fixed list of
requests over a unix socket, for containers with one label only. The package imports the standard library and the docker
SDK.
"""
