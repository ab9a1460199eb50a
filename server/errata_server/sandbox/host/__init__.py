"""Facilities of the host's kernel: which privileges there are, limits by cgroups, the seccomp filter, descriptors to
pass.

`namespace` uses them to run commands.
"""
