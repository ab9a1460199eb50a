"""The read-only file tree below every sandbox: found, built with debootstrap, imported, checked.

What a session changes on top of it belongs in `layers`.
"""
