"""The sandbox backend made of Linux namespaces, overlayfs and cgroups; no daemon."""
