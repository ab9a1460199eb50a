"""Prints a book."""


def table(book):
    """Return the rates between all currencies of a book as lines of text."""
    names = book.currencies
    lines = ["      " + "".join(f"{name:>10}" for name in names)]
    for source in names:
        cells = "".join(f"{book.rate(source, target):>10.4f}" for target in names)
        lines.append(f"{source:<6}{cells}")
    return "\n".join(lines)
