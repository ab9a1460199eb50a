cd /workspace/intervals
cat > intervals.py <<'EOF'
"""Half-open integer intervals ``(start, end)``: start belongs to the interval, end does not."""


def merge(intervals):
    """Return the union of the intervals as sorted, disjoint ones; touching ones are joined, empty ones dropped."""
    merged = []
    for start, end in sorted(intervals):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def gaps(intervals, start, end):
    """Return the parts of ``(start, end)`` that no interval covers, sorted."""
    free = []
    at = start
    for low, high in merge(intervals):
        if min(low, end) > at:
            free.append((at, min(low, end)))
        at = max(at, high)
    if at < end:
        free.append((at, end))
    return free


def overlap(one, other):
    """Return how many integers lie in both intervals."""
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
EOF
python3 -m pytest -q -p no:cacheprovider --no-header | sed 's/ in [0-9.]*s//'
