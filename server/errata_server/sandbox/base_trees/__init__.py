"""The read-only file tree below every sandbox: found, built with debootstrap, imported, checked."""
