"""The trace viewer: static pages below ``/viewer`` that read the episodes of the server that they come from."""
