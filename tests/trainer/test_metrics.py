"""Metrics that do not depend on how a batch was cut."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from errata_trainer.assembly.driver import ChannelDriver
from errata_trainer.monitoring.metrics import Metrics, combined

PARTS = [(0.5, 3), (1.5, 1), (2.0, 4), (0.0, 0)]
"""Sum and count of each of four pieces of a step."""


def recorded(pieces: list[tuple[float, int]], key: str = "a") -> Metrics:
    made = Metrics()
    for total, count in pieces:
        made.step("loss", torch.tensor(total))
        made.mean("divergence", torch.tensor(total), count)
        made.share("share", key, total)
    made.batch("kept", sum(count for _, count in pieces))
    made.running("usd", 1.0)
    made.running("usd", 2.5)
    return made


def read(ranks: list[Metrics], steps: int = 1) -> list[dict[str, float]]:
    """Return what each rank reads."""
    own: list[Any] = []
    for rank in ranks:
        rank.read(steps, lambda values: [own.append(values), values][1:])
    return [Metrics().read(steps, lambda _: own) for _ in ranks]


@pytest.mark.parametrize("cut", [[PARTS], [PARTS[:2], PARTS[2:]], [[one] for one in PARTS]], ids=["1", "2", "4"])
def test_ranks_add_up_to_one_process(cut: list[Any]) -> None:
    (found, *others) = read([recorded(pieces) for pieces in cut])
    assert all(other == found for other in others)
    assert found == pytest.approx({"loss": 4.0, "divergence": 0.5, "share/a": 1.0, "kept": 8.0, "usd": 2.5 * len(cut)})


def test_micro_batches_add_up_to_a_step_and_steps_are_averaged() -> None:
    made = recorded(PARTS + PARTS)
    assert made.read(2, lambda own: [own])["loss"] == pytest.approx(4.0)
    assert made.read(1, lambda own: [own]) == {"usd": 2.5}, "only running counts outlive a reading"


def test_shares_are_of_a_whole_over_ranks_that_saw_other_names() -> None:
    found, _ = read([recorded([(3.0, 1)], "a"), recorded([(1.0, 1)], "b")])
    assert found["share/a"] == pytest.approx(0.75) and found["share/b"] == pytest.approx(0.25)


@pytest.mark.parametrize("carried", [pickle, json], ids=["pickle", "json"])
def test_what_ranks_took_combines_to_what_they_read(carried: Any) -> None:
    def ranks() -> list[Metrics]:
        return [recorded(PARTS[:2], "a"), recorded(PARTS[2:], "b"), Metrics()]

    found, *_ = read(ranks(), steps=3)
    taking = ranks()
    taken = [carried.loads(carried.dumps(rank.take())) for rank in taking]
    assert combined(taken, 3) == found and len(found) == 6
    later = combined([rank.take() for rank in taking], 1)
    assert later == {"usd": 5.0}, "only running counts outlive what was taken"


def test_a_name_has_one_kind() -> None:
    made = Metrics()
    made.step("x", 1.0)
    with pytest.raises(ValueError, match="x was recorded as step, now as mean"):
        made.mean("x", 1.0)


def test_outcomes_of_failing_turns_are_means_over_all_batches() -> None:
    counts: Counter[str] = Counter()
    kept = iter([4, 0, 0, 0])

    def found(*_: Any) -> list[Any]:
        counts["kept"] += next(kept)
        return []

    sites: Any = SimpleNamespace(counts=counts, found=found, kept=lambda *_: [])
    driver = ChannelDriver(sites=sites)
    for _ in range(4):
        driver.items([], [], sample=lambda contexts: [])
    log = driver.metrics.read(1, lambda own: [own])
    assert log["sdpo/kept"] == 1.0 and log["sdpo/no_hint"] == 0.0
