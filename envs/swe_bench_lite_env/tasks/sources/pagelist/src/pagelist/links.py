"""The row of links below a page."""

GAP = None
"""Stands for the pages that are not shown."""


def link_row(paginator, current, around=1):
    """Return page numbers: the first, the last, and `around` on both sides of the current one, with GAP between."""
    last = -(-paginator.total // paginator.per_page)
    shown = {1, last, *range(current - around, current + around + 1)}
    row = []
    before = 0
    for number in sorted(n for n in shown if 1 <= n <= last):
        if number > before + 1:
            row.append(GAP)
        row.append(number)
        before = number
    return row


def next_and_previous(paginator, current):
    """Return the numbers of the pages before and after, None where there is none."""
    last = -(-paginator.total // paginator.per_page)
    return (current - 1 if current > 1 else None, current + 1 if current < last else None)
