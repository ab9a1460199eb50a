"""What a soak takes for growth."""

from __future__ import annotations

from .soak import TOLERANCE, Sample, held


def grown(threads: list[int]) -> float:
    samples = [Sample(n / 2, 270.0, 35, 2, count, n * 4000, n) for n, count in enumerate(threads)]
    first, last = held(samples)["threads"]
    return last / first - 1.0


def test_a_pool_that_breathes_does_not_grow() -> None:
    breathing = [18, 24, 15, 21, 17, 22, 16, 24, 14, 20]
    assert grown([6, 22, 16, *breathing, *breathing, *breathing, 24, 24, 24]) == 0.0


def test_a_thread_every_two_minutes_is_growth() -> None:
    assert grown([20 + n // 4 + n % 3 for n in range(40)]) > TOLERANCE
