"""Writes spans."""

from .units import SECONDS


def show(seconds):
    """Return a span as text: whole seconds, from the largest unit that fits; `0s` for none."""
    left = int(seconds)
    parts = []
    for unit, size in SECONDS.items():
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
