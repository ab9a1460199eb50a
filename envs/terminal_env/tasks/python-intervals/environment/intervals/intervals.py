"""Half-open integer intervals ``(start, end)``: start belongs to the interval, end does not."""


def merge(intervals):
    """Return the union of the intervals as sorted, disjoint ones; touching ones are joined, empty ones dropped."""
    merged = []
    for start, end in intervals:
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def gaps(intervals, start, end):
    """Return the parts of ``(start, end)`` that no interval covers, sorted."""
    free = []
    at = start
    for low, high in merge(intervals):
        if low > at:
            free.append((at, low))
        at = high
    return free


def overlap(one, other):
    """Return how many integers lie in both intervals."""
    return min(one[1], other[1]) - max(one[0], other[0])
