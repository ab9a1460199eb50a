"""Resolves what an operator names for ``errata serve`` (a name, a directory, ``module:attribute``) to an application.

Which packages are installed is found in `environments.discovery`; binding and serving belong to `serve`.
"""
