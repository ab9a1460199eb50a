"""Spending: a hard stop, whatever is in flight."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from errata_trainer.teachers import Budget, BudgetSpent, Spend


async def test_a_call_that_does_not_fit_is_refused_and_a_cheaper_one_is_not() -> None:
    budget = Budget(usd=1.0, spent=Spend(0.5, 10))
    with pytest.raises(BudgetSpent, match=r"0\.6000 USD"):
        await budget.reserve(Spend(0.6, 1))
    with await budget.reserve(Spend(0.5, 1)) as reservation:
        reservation.cost(Spend(0.1, 1))
    assert budget.spent == Spend(pytest.approx(0.6), 11)


async def test_a_call_waits_for_those_in_flight_if_only_they_are_in_the_way() -> None:
    budget = Budget(tokens=100)
    first = await budget.reserve(Spend(0, 80))
    second = asyncio.create_task(budget.reserve(Spend(0, 80)))
    third = asyncio.create_task(budget.reserve(Spend(0, 80)))
    await asyncio.sleep(0)
    assert not second.done()
    third.cancel()
    with first:
        first.cost(Spend(0, 20))
    with await second as reservation:
        reservation.cost(Spend(0, 30))
    assert (budget.spent.tokens, budget.reserved.tokens) == (50, 0)
    with pytest.raises(asyncio.CancelledError):
        await third


async def test_what_waits_is_refused_when_too_much_was_spent() -> None:
    budget = Budget(tokens=100)
    with await budget.reserve(Spend(0, 80)):
        waiting = asyncio.create_task(budget.reserve(Spend(0, 80)))
        await asyncio.sleep(0)
    with pytest.raises(BudgetSpent):
        await waiting


async def test_a_call_that_says_nothing_of_its_cost_counts_in_full() -> None:
    budget = Budget()
    with pytest.raises(RuntimeError), await budget.reserve(Spend(0.5, 7)):
        raise RuntimeError
    assert (budget.spent, budget.reserved) == (Spend(0.5, 7), Spend())


async def test_what_is_spent_after_a_checkpoint_counts_after_a_kill(tmp_path: Path) -> None:
    file = tmp_path / "pairs.spent.json"
    killed = Budget(tokens=200)
    killed.keep_in(file)
    for cost in (40, 120):
        with await killed.reserve(Spend(0.0, 150)) as reservation:
            reservation.cost(Spend(0.5, cost))
    resumed = Budget(tokens=200)
    resumed.resume(Spend(0.5, 40))  # of the checkpoint
    resumed.resume_from(file)
    assert resumed.spent == Spend(1.0, 160)
    with pytest.raises(BudgetSpent):
        await resumed.reserve(Spend(0.0, 50))
    resumed.resume_from(tmp_path / "none")
    file.write_text("{")
    with pytest.raises(ValueError, match="remove it to count from 0"):
        resumed.resume_from(file)


@pytest.mark.parametrize("seed", range(5))
async def test_many_calls_at_once_never_spend_more_than_the_budget(seed: int) -> None:
    draw = random.Random(seed)
    budget = Budget(usd=1.0, tokens=1000)
    made = refused = 0

    async def call() -> None:
        nonlocal made, refused
        bound = Spend(draw.random() / 5, draw.randrange(1, 200))
        try:
            reservation = await budget.reserve(bound)
        except BudgetSpent:
            refused += 1
            return
        with reservation:
            made += 1
            for _ in range(draw.randrange(4)):
                await asyncio.sleep(0)
            reservation.cost(Spend(bound.usd * draw.random(), draw.randrange(bound.tokens + 1)))
            assert budget.spent.usd + budget.reserved.usd <= 1.0 + 1e-6
            assert budget.spent.tokens + budget.reserved.tokens <= 1000

    await asyncio.gather(*(call() for _ in range(200)))
    assert made > 5
    assert refused > 0
    assert (budget.spent.usd <= 1.0, budget.spent.tokens <= 1000, budget.reserved.tokens) == (True, True, 0)


@pytest.mark.parametrize("limits", [{"usd": -1.0}, {"tokens": -1}, {"usd": float("nan")}])
def test_a_negative_budget_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        Budget(**limits)  # type: ignore[arg-type]


def test_a_budget_is_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert (Budget(usd=4.0, tokens=2_000_001).usd, Budget(usd=4.0, tokens=2_000_001).tokens) == (0.5, 250_000)
    assert (Budget(tokens=100, processes=1).tokens, Budget().usd) == (100, None)
    with pytest.raises(ValueError, match="among 0 processes"):
        Budget(processes=0)
