"""The rollout server that samples, which bench/verl_learning.py trains with."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from .models import logprobs, student, student_path
from .sampling_plugin import BATCHES, SamplingServer, Turn, sample

PROMPTS = ((5, 9, 40, 7, 3, 3, 8), (12,), (30, 2, 11, 50))
ROOM = 12
NEVER = frozenset({-1})


def turns(*prompts: tuple[int, ...], ends: frozenset[int] = NEVER, temperature: float = 1.0) -> list[Turn]:
    """Return turns that are to be sampled; those after the same prompt have the same draws."""

    def draws(prompt: tuple[int, ...]) -> list[float]:
        return torch.rand(ROOM, generator=torch.Generator().manual_seed(sum(prompt))).tolist()

    return [Turn(prompt, draws(prompt), temperature, ends) for prompt in prompts]


def sampled(*prompts: tuple[int, ...], **options: Any) -> list[Turn]:
    made = turns(*prompts, **options)
    sample(student().eval(), made)
    return made


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probabilities_are_those_of_a_plain_forward_pass(temperature: float) -> None:
    model = student().eval()
    for turn in sampled(*PROMPTS, temperature=temperature):
        assert len(turn.ids) == ROOM
        with torch.no_grad():
            all_of = logprobs(model, [*turn.prompt, *turn.ids])[len(turn.prompt) - 1 : -1]
        expected = (all_of / temperature).log_softmax(-1).gather(1, torch.tensor(turn.ids)[:, None])[:, 0]
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_turn_is_the_same_in_a_batch_and_alone() -> None:
    for turn in sampled(*PROMPTS):
        (alone,) = sampled(tuple(turn.prompt))
        assert alone.ids == turn.ids
        assert alone.logprobs == pytest.approx(turn.logprobs, abs=1e-4)


def test_tokens_are_drawn_with_their_probabilities_and_greedily_at_temperature_0() -> None:
    model, prompt, count = student().eval(), PROMPTS[0], 4000
    drawn = [Turn(prompt, [draw], 1.0, NEVER) for draw in torch.arange(count).add(0.5).div(count).tolist()]
    sample(model, drawn)
    with torch.no_grad():
        chances = logprobs(model, prompt)[-1].exp()
    found = torch.bincount(torch.tensor([turn.ids[0] for turn in drawn]), minlength=len(chances)) / count
    assert found.tolist() == pytest.approx(chances.tolist(), abs=2 / count)
    (greedy,) = sampled(prompt, temperature=0.0)
    assert greedy.ids[0] == int(chances.argmax())


def test_a_turn_ends_with_the_end_token_while_others_go_on() -> None:
    whole = sampled(*PROMPTS)
    end = whole[0].ids[4]
    cut = sampled(*PROMPTS, ends=frozenset({end}))
    assert len(cut[0].ids) <= 5 and cut[0].is_whole
    for before, after in zip(whole, cut, strict=True):
        stop = before.ids.index(end) + 1 if end in before.ids else ROOM
        assert after.ids == before.ids[:stop]
        assert after.logprobs == pytest.approx(before.logprobs[:stop], abs=1e-4)
    assert any(len(turn.ids) == ROOM for turn in cut)


def test_requests_of_the_same_time_are_one_batch_and_a_seed_repeats_them(tmp_path: Path) -> None:
    path = student_path(tmp_path)

    def asked(seed: int) -> list[list[int]]:
        server = SamplingServer(str(path), seed=seed)
        settings = {"max_tokens": ROOM, "temperature": 1.0, "top_p": 1.0, "top_k": -1}

        async def gathered() -> list[Any]:
            return await asyncio.gather(*(server.generate(list(p), settings) for p in (*PROMPTS, PROMPTS[0])))

        answers = asyncio.run(gathered())
        assert all(len(answer.log_probs) == len(answer.token_ids) <= ROOM for answer in answers)
        return [answer.token_ids for answer in answers]

    first = asked(0)
    assert first[0] != first[3], "a prompt that is asked again has other draws"
    assert asked(0) == first != asked(1)
    batches = [json.loads(line) for line in (path / BATCHES).read_text().splitlines()]
    assert [batch["rows"] for batch in batches] == [4, 4, 4]
    assert batches[0]["tokens"] == sum(map(len, first))


def test_what_the_server_cannot_sample_is_refused(tmp_path: Path) -> None:
    server = SamplingServer(str(student_path(tmp_path)))
    with pytest.raises(ValueError, match="top_p"):
        asyncio.run(server.generate([1], {"max_tokens": 1, "temperature": 1.0, "top_p": 0.9}))
