"""Where an agent's commands run: the interface (`base`), the registry, and the backends.

A backend is a package, in this folder or in another distribution, with a `base.BackendType` that is registered as an
entry point of the group ``errata.sandboxes``. Here are `namespace`, `docker`
and `fake`; `layers`, `base_trees`, `host`, `files` and `launcher` are parts of the namespace backend. This file
imports nothing, because helper processes without the server's dependencies import modules of this package.
"""
