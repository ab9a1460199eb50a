"""Prints sums."""


def report(sums):
    """Return lines of text, sorted by name without regard to case, with the numbers in one column."""
    width = max((len(name) for name in sums), default=0)
    names = sorted(sums, key=str.lower)
    return "".join(f"{name:<{width}}  {sums[name]:>10.2f}\n" for name in names)
