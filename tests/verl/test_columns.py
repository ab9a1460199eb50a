"""Columns over responses say what `collate_columns` says of prompts, responses and padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from errata_trainer import Rollout, SdpoItem, Turn
from errata_trainer.assembly.collator import collate_columns
from errata_trainer.channels.splicing import splice
from errata_trainer.recipes.verl.columns import ERROR_MASK, TEACHER_LOGPROBS, WEIGHTS, response_columns

HEADER, HINT = (8, 9), (20, 21, 22)
NAMES = (ERROR_MASK, WEIGHTS, TEACHER_LOGPROBS)

FIRST = Rollout(
    (5, 6, *HEADER), (31, 32, 33, 40, *HEADER, 34, 35), (1, 1, 1, 0, 0, 0, 1, 1), (Turn(0, 0, 3), Turn(1, 6, 8))
)
SECOND = Rollout((7, *HEADER), (36, 37), (1, 1), (Turn(0, 0, 2),))
EMPTY = Rollout((), (), ())
ROLLOUTS = (FIRST, SECOND, replace(SECOND, completion_ids=(36, 38)))
LENGTHS = [len(rollout.completion_ids) for rollout in ROLLOUTS]


def sites() -> list[list[SdpoItem]]:
    first = [splice(FIRST, turn, HINT, header_ids=HEADER) for turn in (0, 1)]
    return [[replace(first[0], weight=0.5), first[1]], [splice(SECOND, 0, HINT, header_ids=HEADER)], []]


SCORES = [[[-0.1, -0.2, -0.3], [-0.4, -0.5]], [[-0.6, -0.7]], []]


def test_a_value_stands_at_the_place_of_its_token_in_the_response() -> None:
    columns = response_columns(ROLLOUTS, sites(), SCORES, lengths=LENGTHS)
    assert columns[ERROR_MASK] == [[1, 1, 1, 0, 0, 0, 1, 1], [1, 1], [0, 0]]
    assert columns[WEIGHTS] == [[0.5, 0.5, 0.5, 0, 0, 0, 1, 1], [1, 1], [0, 0]]
    expected = [[-0.1, -0.2, -0.3, 0, 0, 0, -0.4, -0.5], [-0.6, -0.7], [0, 0]]
    assert columns[TEACHER_LOGPROBS] == [pytest.approx(row) for row in expected]


def test_they_are_the_padded_columns_without_prompt_and_padding() -> None:
    columns = response_columns(ROLLOUTS, sites(), SCORES, lengths=LENGTHS)
    padded = collate_columns(ROLLOUTS, sites(), pad_id=0, teacher_logprobs=SCORES)
    for name in NAMES:
        for row, rollout in enumerate(ROLLOUTS):
            start = len(rollout.prompt_ids)
            whole = padded[name][row].float()
            assert columns[name][row] == whole[start : start + LENGTHS[row]].tolist()
            whole[start : start + LENGTHS[row]] = 0
            assert not whole.any()  # nothing was left behind
    # They mark what VeRL's response mask marks, which is 1 where the student sampled.
    assert all(
        sampled or not marked
        for rollout, row in zip(ROLLOUTS, columns[ERROR_MASK], strict=True)
        for sampled, marked in zip(rollout.mask, row, strict=True)
    )


def test_a_site_without_a_score_is_left_out() -> None:
    columns = response_columns(ROLLOUTS, sites(), [[SCORES[0][0], None], [None], []], lengths=LENGTHS)
    assert columns[ERROR_MASK] == [[1, 1, 1, 0, 0, 0, 0, 0], [0, 0], [0, 0]]
    assert columns[WEIGHTS][0][6:] == [0, 0] and columns[TEACHER_LOGPROBS][0][6:] == [0, 0]


def test_without_a_teacher_there_is_no_column_of_it_and_every_site() -> None:
    columns = response_columns(ROLLOUTS, sites(), lengths=LENGTHS)
    scored = response_columns(ROLLOUTS, sites(), SCORES, lengths=LENGTHS)
    assert columns == {name: scored[name] for name in (ERROR_MASK, WEIGHTS)}


def test_rows_that_fill_a_batch_up_have_zeros_of_their_own_length() -> None:
    columns = response_columns([*ROLLOUTS, EMPTY], [*sites(), []], [*SCORES, []], lengths=[*LENGTHS, 1])
    assert all(columns[name][-1] == [0.0] for name in NAMES)


def test_rows_become_nested_tensors() -> None:
    for rows in response_columns(ROLLOUTS, sites(), SCORES, lengths=LENGTHS).values():
        nested = torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
        assert nested.dtype == torch.float32 and nested.offsets().diff().tolist() == LENGTHS


@pytest.mark.parametrize(
    ("rollouts", "scores", "lengths", "message"),
    [
        ((FIRST, SECOND, EMPTY), SCORES, [9, 2, 2], "row 0 has error sites and a response of 9 tokens, but a rollout"),
        (
            (FIRST, EMPTY, EMPTY),
            SCORES,
            LENGTHS,
            "row 1 .* a response of 2 tokens, but a rollout of 0",
        ),
        ((FIRST, replace(SECOND, completion_ids=(36, 39)), EMPTY), SCORES, LENGTHS, "its tokens are not the ones"),
        ((FIRST, SECOND, EMPTY), [SCORES[0], [[-0.6]], []], LENGTHS, "2 tokens and 1 log-probabilities"),
    ],
)
def test_what_does_not_fit_is_refused(rollouts: tuple, scores: list, lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        response_columns(rollouts, sites(), scores, lengths=lengths)
