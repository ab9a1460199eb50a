"""Computes percentiles of the latencies of one phase, in milliseconds."""

from __future__ import annotations


def percentile(ordered: list[float], share: float) -> float:
    """Return the value that ``share`` of the sorted values are not above (nearest rank).

    Raises:
        ValueError: There are no values.
    """
    if not ordered:
        raise ValueError("no values: nothing was answered")
    rank = -(-len(ordered) * share // 1)  # rounded up
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def spread_ms(took_s: list[float]) -> dict[str, float]:
    """Return median and 99th percentile of durations in seconds; empty where there were none."""
    if not took_s:
        return {}
    ordered = sorted(took_s)
    return {"p50_ms": percentile(ordered, 0.5) * 1e3, "p99_ms": percentile(ordered, 0.99) * 1e3}
