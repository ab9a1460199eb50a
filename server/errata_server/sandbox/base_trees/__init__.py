"""The read-only file tree below every sandbox: found, built with debootstrap, imported, derived, checked.

The changes of sessions are in `layers`.
"""
