"""Where commands of an agent run: the seam (`base`), the registry, and the backends `namespace` and `fake`.

A backend is one package, here or anywhere else, and one entry point. `layers`, `base_trees`, `host`, `files` and
`launcher` are parts of the namespace backend. Nothing is imported in this file: helper processes without the server's
dependencies import modules below it.
"""
