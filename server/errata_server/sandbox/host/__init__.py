"""What the host's kernel offers to a sandbox: privileges, cgroups, seccomp filters, descriptors."""
