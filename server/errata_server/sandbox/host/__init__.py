"""The host's kernel as the sandbox uses it: privileges, cgroups, the seccomp filter, descriptors.

It finds out what this host has; `namespace` uses that to run commands.
"""
