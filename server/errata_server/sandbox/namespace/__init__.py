"""The sandbox backend made of Linux namespaces, overlayfs and cgroups; no daemon.

The code that runs with privileges is in `launcher`, in a process of its own.
"""
