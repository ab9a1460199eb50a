"""The sandbox backend that uses Linux namespaces, overlayfs and cgroups, without a daemon.

The code that needs privileges is in `launcher` and runs in another process.
"""
