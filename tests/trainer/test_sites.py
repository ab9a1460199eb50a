"""Which failing turns are distilled, and what each may weigh."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from errata_protocol.rollouts import ErrorMarker
from errata_trainer import Call, Rollout, SdpoItem, Turn
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.assembly.sites import Site, Sites, capped
from errata_trainer.channels.guard import DivergenceGuard
from errata_trainer.hints import Attempt, FailedTurn, Hint

KEYS = ("fs.missing", "cmd.missing", "tool.malformed")


class Renderer:
    """Hints are one token."""

    header_ids = (7,)

    def hint_ids(self, text: str, *, after: str) -> tuple[int, ...]:
        return (9,)


class Hinter:
    """Writes the key of the error."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def hint(self, failed: FailedTurn) -> Hint | None:
        self.asked.append(failed.turn.index)
        assert failed.marker is not None and failed.marker.hint_template_key is not None
        return Hint("advice", failed.marker.hint_template_key, "0", "template")


def rollout(*keys: str) -> Rollout:
    """Return a rollout of failing turns of two tokens, each after a header."""
    completion = [token for n in range(len(keys)) for token in (20 + n, 30 + n, 7)][: 3 * len(keys) - 1]
    mask = [one for _ in keys for one in (1, 1, 0)][: len(completion)]
    turns = []
    for n, key in enumerate(keys):
        marker = ErrorMarker(error_kind="x", hint_template_key=key, severity="error")
        turns.append(Turn(n, 3 * n, 3 * n + 2, (Call("run", {}, n + 1, marker),)))
    return Rollout((1, 7), tuple(completion), tuple(mask), tuple(turns))


def sites(hinter: Any = None, **options: Any) -> Sites:
    return Sites(hinter or Hinter(), Renderer(), **options)  # type: ignore[arg-type]


def keys_of(found: list[Site]) -> list[str]:
    return [site.hint.key for site in found]


@pytest.mark.parametrize(
    ("patterns", "kept"),
    [
        (None, list(KEYS)),
        (("fs.*",), ["fs.missing"]),
        (("!tool.malformed",), ["fs.missing", "cmd.missing"]),
        (("*.missing", "!cmd.*"), ["fs.missing"]),
        ((), list(KEYS)),
    ],
)
def test_only_the_keys_that_are_wanted_are_hinted(patterns: Any, kept: list[str]) -> None:
    made = sites(hint_keys=patterns)
    assert keys_of(made.found([rollout(*KEYS)], [None])) == kept
    assert made.counts["other_key"] == 3 - len(kept)
    assert len(made.hinter.asked) == len(kept)  # type: ignore[attr-defined]


def test_a_pattern_alone_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"hint_keys is a sequence of patterns: \['fs.missing'\]"):
        sites(hint_keys="fs.missing")


def test_a_turn_without_a_hint_leaves_its_place_to_a_later_one() -> None:
    class Silent(Hinter):
        def hint(self, failed: FailedTurn) -> Hint | None:
            return None if failed.turn.index == 0 else super().hint(failed)

    made = sites(Silent(), max_sites=2)
    found = made.found([rollout("a", "b", "c", "d")], [None])
    assert [site.failed.turn.index for site in found] == [1, 2]
    assert (made.counts["no_hint"], made.counts["beyond_max_sites"]) == (1, 1)


def test_hints_are_written_side_by_side_where_the_hinter_can() -> None:
    together = threading.Barrier(4, timeout=60.0)

    class Slow(Hinter):
        concurrent = True

        def hint(self, failed: FailedTurn) -> Hint | None:
            together.wait()  # breaks, and raises, unless four are here at once
            return super().hint(failed)

    found = sites(Slow()).found([rollout("a", "b"), rollout("c", "d")], [None, None])
    assert keys_of(found) == ["a", "b", "c", "d"], "in the order of rows and turns"


def test_a_hinter_of_batches_reads_every_rollout_first() -> None:
    class Batched(Hinter):
        def begin_batch(self, attempts: list[Attempt]) -> None:
            self.attempts = attempts

    hinter = Batched()
    with pytest.raises(ValueError, match="give decode="):
        sites(hinter)
    rollouts = [rollout("a"), rollout("b"), replace(rollout("c"), prompt_ids=(5, 7))]
    sites(hinter, decode=str).found(rollouts, [None] * 3)
    assert [one.rollout for one in hinter.attempts] == rollouts
    assert [one.texts for one in hinter.attempts] == [("(20, 30)",)] * 3
    groups = [one.group for one in hinter.attempts]
    assert groups[0] == groups[1] != groups[2], "equal prompts are a group"


class EpisodeRunner:
    """Of an episode that is played elsewhere."""


def test_only_what_is_asked_about_is_sampled() -> None:
    check = CounterfactualCheck("sample", rate=0.5, budget=2, seed=1)
    made = sites(check=check, max_sites=8)
    rollouts = [rollout("a", "b", "c", "d") for _ in range(4)]
    found = made.found(rollouts, [None] * 4)
    sampled: list[int] = []

    def sample(contexts: Any) -> list[None]:
        sampled.append(len(contexts))
        return [None] * len(contexts)

    kept = made.kept(found, [EpisodeRunner()] * 4, sample)  # type: ignore[list-item, arg-type]
    assert sampled == [2], "the budget, of about eight by the rate"
    assert len(kept) == 16 and made.counts["not_sampled"] == 2


def test_a_key_that_never_helps_fades_out_and_one_that_helps_stays() -> None:
    check = CounterfactualCheck("sample")
    assert check.weight("a") == 1.0, "nothing is known of it"
    check.counts["a", "still_fails"] = 8
    check.counts["b", "error_gone"] = 5
    check.counts["b", "still_fails"] = 5
    assert check.weight("a") == pytest.approx(0.2) and check.weight("b") == 1.0
    made = sites(check=check)
    kept = made.kept(made.found([rollout("a", "b")], [None]), [None], lambda contexts: [])
    assert [site.item.weight for site in kept] == pytest.approx([0.2, 1.0])


def site(key: str, tokens: int) -> Site:
    ids = tuple(range(tokens))
    item = SdpoItem(0, ids, ids, ids, ids, hint_template_key=key)
    failed = FailedTurn(rollout(key), Turn(0, 0, 2), Call("run", {}))
    return Site(0, failed, Hint("", key, "0", "template"), item)


def weights(*found: Site, of_site: float = 1.0, of_key: float = 1.0) -> list[float]:
    return [one.item.weight for one in capped(found, of_site, of_key)]


def test_no_site_and_no_key_weighs_more_than_its_share() -> None:
    long, short = site("a", 80), [site("b", 10), site("c", 10)]
    assert weights(long, *short) == [1.0, 1.0, 1.0]
    assert weights(long, *short, of_site=0.4) == pytest.approx([0.5, 1.0, 1.0])
    assert weights(long, *short, of_site=0.1) == pytest.approx([5 / 12, 1.0, 1.0]), "not below an equal share"
    assert weights(long) == weights(long, of_site=0.1, of_key=0.1) == [1.0], "alone it keeps its weight"
    many = [site("a", 10) for _ in range(8)] + [site("b", 20)]
    assert weights(*many, of_key=0.5) == pytest.approx([50 / 80] * 8 + [1.0])


@pytest.mark.parametrize("name", ["max_site_share", "max_key_share"])
@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, float("nan")])
def test_a_share_is_above_0_and_at_most_1(name: str, share: float) -> None:
    with pytest.raises(ValueError, match=name):
        sites(**{name: share})


def test_the_guard_leaves_out_what_is_far_from_the_others() -> None:
    guard = DivergenceGuard(10.0, least=4, window=6)
    assert guard.outliers([0.1, 50.0, 0.1]) == [False, False, False], "too few to tell"
    assert guard.outliers([0.1]) == [False]
    assert guard.outliers([0.9, 1.1, float("nan"), float("inf")]) == [False, True, True, True]
    assert guard.outliers([6.0] * 6) == [True] * 6
    assert guard.outliers([6.0]) == [False], "the window has moved on: it is what all sites are like"
    for bad in (1.0, 0.0, float("nan")):
        with pytest.raises(ValueError, match="factor"):
            DivergenceGuard(bad)
