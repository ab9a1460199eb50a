"""Resolves a target of ``errata serve`` (a name, a directory, or ``module:attribute``) to an application.

`environments.discovery` finds installed packages; listening and serving belong to `serve`.
"""
