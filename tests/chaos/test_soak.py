"""What a soak takes for growth, on what a run of 20 minutes recorded, and on that with leaks added to it."""

from __future__ import annotations

from collections.abc import Callable

from .soak import Sample, held

RSS_MIB = [
    130.9, 133.1, 133.4, 134.0, 134.3, 134.3, 134.6, 134.7, 134.7, 134.7, 134.8, 134.8, 134.8, 134.8, 135.3, 135.3,
    135.3, 135.3, 135.3, 135.3, 135.4, 135.4, 135.5, 135.5, 135.5, 135.5, 135.5, 135.5, 135.6, 135.6, 135.7, 135.7,
    135.7, 135.7, 135.8, 135.8, 135.8, 135.8, 135.8, 135.8,
]  # fmt: skip
DESCRIPTORS = [
    26, 30, 30, 32, 32, 32, 32, 31, 31, 31, 33, 32, 31, 32, 35, 34, 35, 35, 36, 34, 34, 34, 35, 34, 33, 36, 35, 36, 34,
    33, 33, 34, 33, 34, 33, 34, 34, 34, 35, 34,
]  # fmt: skip
THREADS = [
    5, 7, 7, 9, 9, 9, 9, 9, 9, 8, 9, 9, 9, 8, 10, 9, 9, 9, 9, 9, 10, 10, 9, 10, 9, 10, 10, 10, 10, 10, 10, 10, 9, 9, 10,
    9, 9, 10, 9, 10,
]  # fmt: skip

Leak = Callable[[float], float]
"""What is leaked until a minute of the run."""


def nothing(minute: float) -> float:
    return 0


def grew(rss: Leak = nothing, descriptors: Leak = nothing, threads: Leak = nothing) -> set[str]:
    """Return what a run grew that leaked something besides."""
    samples = [
        Sample(
            at, mib + rss(at), files + int(descriptors(at)), 5, count + int(threads(at)), 300_000 + n * 3700, 164 + n
        )
        for n, (mib, files, count) in enumerate(zip(RSS_MIB, DESCRIPTORS, THREADS, strict=True))
        for at in [n / 2]
    ]
    return {name for name, of in held(samples).items() if of.grew}


def threads_grew(counts: list[int]) -> bool:
    return held([Sample(n / 2, 270.0, 35, 2, count, n * 4000, n) for n, count in enumerate(counts)])["threads"].grew


def test_a_steady_run_grows_nothing() -> None:
    assert grew() == set()


def test_a_descriptor_a_minute_is_growth() -> None:
    assert grew(descriptors=lambda minute: minute) == {"descriptors"}


def test_a_thread_every_five_minutes_is_growth() -> None:
    assert grew(threads=lambda minute: minute / 5) == {"threads"}


def test_half_a_percent_of_memory_a_minute_is_growth() -> None:
    assert grew(rss=lambda minute: 0.005 * RSS_MIB[0] * minute) == {"rss_mib"}


def test_a_pool_that_breathes_does_not_grow() -> None:
    breathing = [18, 24, 15, 21, 17, 22, 16, 24, 14, 20]
    assert not threads_grew([6, 22, 16, *breathing, *breathing, *breathing, 24, 24, 24])


def test_a_thread_every_two_minutes_is_growth_in_a_pool_that_breathes() -> None:
    assert threads_grew([20 + n // 4 + n % 3 for n in range(40)])


def test_one_thread_more_is_none_that_leaks_and_two_are() -> None:
    assert not threads_grew([9] * 20 + [10] * 20)
    assert threads_grew([9] * 20 + [11] * 20)
