"""Turns of an episode as the samples of a trainer."""

from __future__ import annotations

from typing import Any

import pytest

from errata_trainer import Rollout, Turn
from errata_trainer.packing import SampledTurn, TokenCount, counted, discounted, pack, sample_of, turns_of


def turn(prompt: str, response: str, *, logprobs: bool = True) -> SampledTurn:
    """Return a turn whose tokens are letters."""
    ids = tuple(map(ord, response))
    return SampledTurn(tuple(map(ord, prompt)), ids, tuple(-one / 100 for one in ids) if logprobs else None)


def shown(packing: Any) -> list[tuple[str, str]]:
    """Return each sample as its letters and the digit of each letter's turn."""
    return [
        ("".join(map(chr, one.ids)), "".join("." if segment < 0 else str(segment) for segment in one.segments))
        for one in packing.samples
    ]


KEPT = [turn("ab", "CD"), turn("abCDe", "F"), turn("abCDeFgh", "IJ")]


@pytest.mark.parametrize(
    "turns, options, expected, left_out",
    [
        pytest.param(KEPT, {}, [("abCDeFghIJ", "..00.1..22")], (), id="prefix kept"),
        pytest.param(
            [*KEPT[:2], turn("abcdeFgh", "IJ"), turn("abcdeFghIJk", "L")],
            {},
            [("abCDeF", "..00.1"), ("abcdeFghIJkL", "........22.3")],
            (),
            id="prefix broken: another sample begins",
        ),
        pytest.param([turn("ab", "CD"), turn("a", "E")], {}, [("abCD", "..00"), ("aE", ".1")], (), id="shortened"),
        pytest.param([turn("ab", "CD"), turn("abCD", "E")], {}, [("abCDE", "..001")], (), id="empty delta"),
        pytest.param(
            [turn("ab", "CD"), turn("abCD", "E"), turn("abCDEf", "G")],
            {"separate_runs": True},
            [("abCD", "..00"), ("abCDEfG", "....1.2")],
            (),
            id="empty delta, turns apart",
        ),
        pytest.param(KEPT, {"max_tokens": 9}, [("abCDeF", "..00.1")], (2,), id="tail turn cut whole"),
        pytest.param(KEPT, {"max_tokens": 10}, [("abCDeFghIJ", "..00.1..22")], (), id="just long enough"),
        pytest.param(KEPT, {"max_tokens": 3}, [], (0, 1, 2), id="nothing fits"),
        pytest.param(
            [turn("abcdef", "G"), turn("ab", "H")], {"max_tokens": 4}, [("abH", "..1")], (0,), id="a long one before"
        ),
        pytest.param([*KEPT[:2], turn("abCDeFgh", "")], {}, [("abCDeF", "..00.1")], (), id="observation-only tail"),
        pytest.param(
            [KEPT[0], turn("abCDe", ""), turn("abCDef", "G")],
            {},
            [("abCDefG", "..00..2")],
            (),
            id="a turn without tokens keeps its index",
        ),
        pytest.param(KEPT, {"lost": "SESSION_LOST"}, [], (0, 1, 2), id="lost"),
        pytest.param([], {}, [], (), id="no turn"),
        pytest.param(
            KEPT,
            {"merge": False},
            [("abCD", "..00"), ("abCDeF", ".....1"), ("abCDeFghIJ", "........22")],
            (),
            id="a sample for each turn",
        ),
        pytest.param(
            KEPT, {"merge": False, "max_tokens": 6}, [("abCD", "..00"), ("abCDeF", ".....1")], (2,), id="apart, cut"
        ),
    ],
)
def test_turns_are_packed(
    turns: list[SampledTurn], options: dict[str, Any], expected: list[tuple[str, str]], left_out: tuple[int, ...]
) -> None:
    packing = pack(turns, **options)
    assert shown(packing) == expected
    assert packing.left_out == left_out
    for sample in packing.samples:
        assert len(sample.ids) == len(sample.segments) == len(sample.mask)
        assert sample.logprobs == tuple(
            -one / 100 if sampled else 0.0 for one, sampled in zip(sample.ids, sample.mask, strict=True)
        )


def test_a_turn_without_logprobs_leaves_its_sample_without_any() -> None:
    turns = [turn("ab", "CD"), turn("abCDe", "F", logprobs=False), turn("x", "Y")]
    assert [sample.logprobs is None for sample in pack(turns).samples] == [True, False]


def test_values_of_turns_are_spread_over_their_tokens() -> None:
    [sample] = pack([KEPT[0], turn("abCDe", ""), turn("abCDef", "G")]).samples
    assert sample.turns == (0, 2)
    assert sample.spread([0.5, 9.0, -1.0]) == [0.0, 0.0, 0.5, 0.5, 0.0, 0.0, -1.0]
    assert sample.spread({0: 1, 2: 2}) == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 2.0]
    with pytest.raises(IndexError):
        sample.spread([0.5])


def test_returns_are_those_of_all_turns_even_where_the_tail_is_cut() -> None:
    returns = discounted([0, 0, 1.0], 0.5)
    assert returns == [0.25, 0.5, 1.0]
    [sample] = pack(KEPT, max_tokens=6).samples
    assert sample.spread(returns) == [0, 0, 0.25, 0.25, 0, 0.5]


def test_a_rollout_is_one_sample() -> None:
    completion, mask = "CDeFghIJk", (1, 1, 0, 1, 0, 0, 1, 1, 0)
    rollout = Rollout(
        tuple(map(ord, "ab")),
        tuple(map(ord, completion)),
        mask,
        (Turn(0, 0, 2), Turn(1, 3, 4), Turn(2, 6, 8)),
        logprobs=tuple(-ord(one) / 100 if m else 0.0 for one, m in zip(completion, mask, strict=True)),
    )
    assert turns_of(rollout) == KEPT
    sample = sample_of(rollout)
    [packed] = pack(turns_of(rollout)).samples
    assert sample.ids[:-1] == packed.ids
    assert sample.segments[:-1] == packed.segments
    assert sample.logprobs is not None and sample.logprobs[:-1] == packed.logprobs
    assert (sample.ids[-1], sample.segments[-1], sample.logprobs[-1]) == (ord("k"), -1, 0.0)


def test_a_rollout_whose_turns_are_not_known_has_its_runs_as_segments() -> None:
    rollout = Rollout((1,), (2, 3, 4, 5), (1, 0, 1, 1))
    assert sample_of(rollout).segments == (-1, 0, -1, 1, 1)
    with pytest.raises(ValueError, match="the turns of the rollout have 0 tokens, its mask 3"):
        turns_of(rollout)


def test_tokens_and_padding_are_counted() -> None:
    """Lengths of an episode in a terminal: a `pwd`, a failing `cat`, an unknown tool and a submit."""
    turns, prompt = [], (0,) * 45
    for length, after in ((73, 72), (85, 113), (65, 72), (61, 0)):
        turns.append(SampledTurn(prompt, (1,) * length))
        prompt += (1,) * length + (0,) * after
    assert [len(one.prompt_ids) for one in turns] == [45, 190, 388, 525]
    apart, packed = pack(turns, merge=False).samples, pack(turns).samples
    assert counted(apart) == TokenCount(4, 1432, 4 * 586)
    assert counted(packed) == TokenCount(1, 586, 586)
    assert counted(apart, length=4096).padded == 16_384
    assert counted(packed, length=4096).padded == 4_096
    assert counted([]) == TokenCount(0, 0, 0)
    with pytest.raises(ValueError, match="a sample has 586 tokens, and rows are padded to 585"):
        counted(packed, length=585)


def test_settings_out_of_their_range_are_refused() -> None:
    with pytest.raises(ValueError, match="max_tokens is 0"):
        pack(KEPT, max_tokens=0)
    with pytest.raises(ValueError, match=r"gamma is 1\.5"):
        discounted([1.0], 1.5)
    with pytest.raises(ValueError, match="1 log-probabilities for the 2 tokens of a turn"):
        SampledTurn((1,), (2, 3), (-0.1,))
