"""The broker ``errata sandboxd``: the only process with the container engine's socket.

It offers a complete list of verbs over a unix socket, each bound to containers of one label. It imports the standard
library and the docker SDK only.
"""
