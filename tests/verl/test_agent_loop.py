"""The agent loop: VeRL's base class, tokens and parsers, a scripted generator, and a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.dataset.rl_dataset import RLHFDataset

from errata_protocol.errors import InvalidRequest, ServiceError, SessionLost
from errata_trainer.episodes.tools import Tool, schema_of
from errata_trainer.recipes.verl import EpisodeOptions, write_dataset
from errata_trainer.recipes.verl import dataset as dataset_module
from errata_trainer.recipes.verl.options import options_of
from errata_trainer.recipes.verl.tool_calls import parser_schema
from errata_trainer.tiny import END

from ..environments.shelf import TOGETHER, ShelfEnvironment
from ..machine_speed import SLOWDOWN
from ..server.local_server import LocalServer
from .played import PROMPT, TOKENIZER, Generator, agent_loop, play, step


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with LocalServer("tests.environments.shelf:SPEC", tmp_path_factory.mktemp("data")) as server:
        yield server.url


def finding(turn: int) -> str:
    return (step(tool="read", path="green"), step(tool="read", path="red"), step(tool="submit", word="owl"))[turn]


def spelled(text: str) -> list[int]:
    """Return tokens of a text that a tokenizer would not choose: one for each character."""
    head = [token for letter in text.removesuffix(END) for token in TOKENIZER.encode(letter, add_special_tokens=False)]
    return [*head, TOKENIZER.eos_token_id]


def test_tokens_are_those_that_were_sampled_and_heard(url: str) -> None:
    generator = Generator(finding, spelled)
    played = play(url, generator)
    assert generator.said[0] != TOKENIZER.encode(finding(0) + END, add_special_tokens=False)
    sampled = [token for token, one in zip(played.response_ids, played.response_mask, strict=True) if one]
    assert sampled == [token for turn in generator.said for token in turn]
    for turn, (_, ids, _) in enumerate(generator.asked):  # each turn continued exactly what is trained on
        whole = [*played.prompt_ids, *played.response_ids]
        assert whole[: len(ids) + len(generator.said[turn])] == [*ids, *generator.said[turn]]
    prompt = TOKENIZER.decode(played.prompt_ids)
    assert "Find the word.\n" in prompt and "One of red, green, blue holds a word." in prompt
    assert prompt.endswith("<|im_end|>\n<|im_start|>assistant\n")
    heard = TOKENIZER.decode([t for t, one in zip(played.response_ids, played.response_mask, strict=True) if not one])
    assert "no file green" in heard and "the word is owl" in heard and heard.count("<|im_start|>assistant") == 2


def test_reward_log_probabilities_and_versions_are_the_episodes_own(url: str) -> None:
    played = play(url, Generator(finding))
    assert played.reward_score == 1.0
    assert played.extra_fields["reward_extra_info"] == {"score": 1.0, "failing_calls": 1}
    assert (played.extra_fields["min_global_steps"], played.extra_fields["max_global_steps"]) == (7, 9)
    logprobs = played.response_logprobs
    assert {lp for lp, one in zip(logprobs, played.response_mask, strict=True) if one} == {-0.25, -1.25, -2.25}
    assert {lp for lp, one in zip(logprobs, played.response_mask, strict=True) if not one} == {0.0}
    columns = played.as_dict()  # what VeRL makes of it
    assert float(columns["rm_scores"].sum()) == 1.0 and columns["responses"].shape == columns["response_mask"].shape


def test_a_turn_without_a_call_ends_the_episode(url: str) -> None:
    played = play(url, Generator(lambda turn: "I do not know."))
    assert played.reward_score == 0.0 and all(played.response_mask)


def test_all_turns_of_a_rollout_go_to_one_rollout_server(url: str) -> None:
    generator = Generator(finding)
    play(url, generator)
    assert len({request for request, _, _ in generator.asked}) == 1


def test_a_failing_machine_is_raised_and_is_no_reward(url: str) -> None:
    with pytest.raises(SessionLost, match=r"does not count.*the shelf fell"):
        play(url, Generator(lambda turn: step(tool="read", path="broken")))


def test_a_call_that_takes_longer_than_it_may_is_raised(url: str) -> None:
    try:
        with pytest.raises(SessionLost, match="CALL_DEADLINE: step of shelf took longer"):
            play(url, Generator(lambda turn: step(tool="read", path="together")), call_s=3.0 * SLOWDOWN)
    finally:
        for waiting in ShelfEnvironment.waiting:  # the server's call goes on, and its end would wait for it
            waiting.get_loop().call_soon_threadsafe(lambda future=waiting: future.done() or future.set_result(None))
        ShelfEnvironment.waiting.clear()


def test_a_turn_that_the_rollout_server_gave_up_is_raised(url: str) -> None:
    generator = Generator(finding)
    generator.stop_reason = "aborted"
    with pytest.raises(ServiceError, match="aborted"):
        play(url, generator)


def test_rollouts_of_a_process_play_side_by_side(url: str) -> None:
    """Each of them looks at what answers only when all of them look."""

    async def all_of_them() -> list[AgentLoopOutput]:
        row = {"raw_prompt": PROMPT, "task": "{}"}
        says = (step(tool="read", path="together"), "Done.")
        loops = [agent_loop(url, Generator(says.__getitem__)) for _ in range(TOGETHER)]
        return await asyncio.gather(*(loop.run({"temperature": 1.0}, **row) for loop in loops))

    assert [played.reward_score for played in asyncio.run(all_of_them())] == [0.0] * TOGETHER


def test_a_prompt_that_is_too_long_is_refused_and_not_cut(url: str) -> None:
    with pytest.raises(InvalidRequest, match=r"has \d+ tokens, and prompt_tokens=16"):
        play(url, Generator(finding), prompt=16)


def test_a_response_ends_at_its_length(url: str) -> None:
    played = play(url, Generator(finding), response=40)
    assert len(played.response_ids) == len(played.response_mask) == len(played.response_logprobs) <= 40


def test_turns_and_their_tokens_have_limits(url: str) -> None:
    generator = Generator(lambda turn: step(tool="read", path="green"))
    play(url, generator, turns=2, turn_tokens=90)
    assert [sampling["max_tokens"] for _, _, sampling in generator.asked] == [90, 90]


def test_a_task_of_a_row_begins_the_episode(url: str) -> None:
    says = (step(tool="read", path="blue"), step(tool="submit", word="elk"))
    assert play(url, Generator(says.__getitem__), {"place": "blue", "word": "elk"}).reward_score == 1.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"\+errata.url="),
        ({"errata": {"env": "shelf"}}, r"\+errata.url="),
        ({"errata": {"url": "http://h", "enviroment": "shelf"}}, "no option errata.enviroment: there are url, env"),
        ({"errata": {"url": "http://h", "turns": 0}}, "errata.turns is 0"),
        ({"errata": {"url": "http://h", "tools": "read"}}, "errata.tools is a list"),
    ],
)
def test_a_wrong_option_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(OmegaConf.create(given))


def test_a_token_comes_from_the_process_and_not_from_the_printed_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EpisodeOptions("http://h", headers={"X-Run": "1"}, token_env="SHELF_TOKEN")
    monkeypatch.setenv("SHELF_TOKEN", "secret")
    assert options.all_headers() == {"X-Run": "1", "Authorization": "Bearer secret"} and "secret" not in repr(options)
    monkeypatch.delenv("SHELF_TOKEN")
    with pytest.raises(ValueError, match="SHELF_TOKEN, which is not set here"):
        options.all_headers()


@pytest.mark.parametrize(
    ("row", "columns", "task"),
    [
        ({"task": '{"task_id": "a", "seed": null}', "uid": "u"}, None, {"task_id": "a"}),
        ({"task": {"task_id": "a", "seed": None}}, None, {"task_id": "a"}),
        ({"instance_id": "i", "split": None, "uid": "u"}, ("instance_id", "split"), {"instance_id": "i"}),
    ],
)
def test_a_rows_task_is_what_reset_is_given(row: dict[str, Any], columns: Any, task: dict[str, Any]) -> None:
    assert EpisodeOptions("http://h", task_columns=columns).task_of(row) == task


@pytest.mark.parametrize(
    ("row", "message"),
    [({"uid": "u"}, "no column 'task'"), ({"task": "{"}, "no JSON"), ({"task": "[1]"}, "no JSON object but list")],
)
def test_a_row_without_a_task_is_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        EpisodeOptions("http://h").task_of(row)


def test_parsers_are_told_the_types_of_arguments() -> None:
    optional = {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "How many."}
    tool = Tool("run", "Run it.", {"type": "object", "properties": {"n": optional, "any": {}}, "required": ["n"]})
    function = parser_schema(schema_of(tool)).function
    assert function.parameters.properties["n"].type == ["integer", "null"]
    assert "string" in function.parameters.properties["any"].type and function.parameters.required == ["n"]


def test_verls_data_set_reads_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = [{"task_id": "a"}, {"task_id": "b", "split": "test"}]
    monkeypatch.setattr(dataset_module, "offered_tasks", lambda *_, **__: tasks)
    assert write_dataset(tmp_path / "train.parquet", "http://h", "shelf") == 2
    config = OmegaConf.create({"max_prompt_length": 512, "filter_overlong_prompts": False, "return_raw_chat": True})
    rows = RLHFDataset(str(tmp_path / "train.parquet"), TOKENIZER, config, None)
    assert len(rows) == 2 and rows[1]["agent_name"] == "errata" and rows[1]["index"] == 1
    assert [EpisodeOptions("http://h").task_of(rows[n]) for n in (0, 1)] == tasks
    assert rows[0]["raw_prompt"][0]["role"] == "user"


def test_a_rollout_has_run_step_and_prompt_as_labels(url: str) -> None:
    async def played() -> None:
        loop = agent_loop(url, Generator(finding))
        OmegaConf.update(loop.config, "trainer.experiment_name", "named", force_add=True)
        row = {"raw_prompt": PROMPT, "task": "{}", "uid": "prompt-1", "session_id": 0, "global_steps": torch.tensor(6)}
        await loop.run({"temperature": 1.0}, **row)

    asyncio.run(played())
    (found,) = httpx.get(f"{url}/episodes", params={"group": "prompt-1"}).json()["episodes"]
    assert (found["run"], found["step"]) == ("named", 6)
