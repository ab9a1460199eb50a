"""What the host's kernel offers to a sandbox: privileges, cgroups, seccomp filters, descriptors.

What differs from host to host; how a command is started with it belongs in `namespace`.
"""
