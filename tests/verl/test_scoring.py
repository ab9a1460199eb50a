"""What rollout servers are asked beside rollouts: a client in VeRL's own contract, failures of each kind, and the tiny
model."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import importlib.util
import json
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.workers.rollout.replica import TokenOutput

from errata_server.simulation import simulated
from errata_trainer import SdpoItem
from errata_trainer.episodes.tools import Tool, schema_of
from errata_trainer.recipes.verl.scoring import RequestLimits, Scorer, sampled_calls, teacher_logprobs
from errata_trainer.recipes.verl.tool_calls import TurnParser
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer(["One of red, green, blue holds a word. Submit it."])
READ = Tool("read", "Read.", {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]})
TURNS = TurnParser(ToolParser.get_tool_parser("hermes", TOKENIZER), TOKENIZER, [schema_of(READ)])
SAMPLING = {"temperature": 0.7, "max_tokens": 64}


def item(*ids: int, first: int = 3) -> SdpoItem:
    """Return an error site whose targets are the teacher's tokens from ``first`` on."""
    places = range(first, len(ids))
    positions = tuple(place - 1 for place in places)
    return SdpoItem(0, ids, tuple(one - 1 for one in positions), positions, ids[first:])


ITEMS = [item(*range(start, start + 7)) for start in (10, 20, 30, 40)]


def logprob(place: int, token: int) -> float:
    """Return the log-probability that the fake servers give a token at a place of its row."""
    return -place - token / 100


def expected(one: SdpoItem) -> list[float]:
    return [logprob(p + 1, token) for p, token in zip(one.teacher_positions, one.target_ids, strict=True)]


def verls(path: str, name: str) -> Callable[..., None]:
    """Return a function of VeRL without its module, which imports an inference engine."""
    (root,) = importlib.util.find_spec("verl").submodule_search_locations  # type: ignore[union-attr, misc]
    tree = ast.parse((Path(root) / path).read_text())
    (found,) = (one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name)
    space: dict[str, Any] = {"Optional": Optional, "RequestOutput": Any}
    exec(compile(ast.Module([found], []), path, "exec"), space)
    made: Callable[..., None] = space[name]
    return made


def of_vllm(ids: list[int], count: int) -> dict[str, Any]:
    entries = [{token: SimpleNamespace(logprob=logprob(at, token), rank=9)} for at, token in enumerate(ids)]
    fields: dict[str, Any] = {}
    extract = verls("workers/rollout/vllm_rollout/utils.py", "extract_prompt_logprobs")
    extract(SimpleNamespace(prompt_logprobs=[None, *entries[1:]]), count, fields)
    return fields


def of_sglang(ids: list[int], count: int) -> dict[str, Any]:
    entries = [(logprob(at, token) if at else None, token, None) for at, token in enumerate(ids)]
    fields: dict[str, Any] = {}
    extract = verls("workers/rollout/sglang_rollout/async_sglang_server.py", "_extract_prompt_logprobs_sglang")
    extract({"input_token_logprobs": entries}, count, len(ids), fields)
    return fields


def answer(prompt_ids: list[int]) -> TokenOutput:
    return TokenOutput(token_ids=[2], stop_reason="completed", extra_fields=of_vllm(prompt_ids, 0))


Play = Callable[[list[int]], Awaitable[TokenOutput]]


class Client:
    """In the place of VeRL's client of rollout servers.

    Args:
        play: Makes the answer to a prompt.
    """

    def __init__(self, play: Play) -> None:
        self._play = play
        self.asked: list[tuple[str, list[int], dict[str, Any]]] = []
        self.running = self.most = 0

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.asked.append((request_id, prompt_ids, dict(sampling_params)))
        sampling_params.clear()  # servers take settings out of it
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._play(prompt_ids)
        finally:
            self.running -= 1


async def at_once(prompt_ids: list[int]) -> TokenOutput:
    return answer(prompt_ids)


def changed(field: str, change: Callable[[list[Any]], Any]) -> Play:
    """Return answers to the row of 20 of which a field is changed; None takes it out."""

    async def play(prompt_ids: list[int]) -> TokenOutput:
        out = answer(prompt_ids)
        if prompt_ids[0] == 20:
            value = change(out.extra_fields.pop(field))
            out.extra_fields |= {} if value is None else {field: value}
        return out

    return play


async def aborted(prompt_ids: list[int]) -> TokenOutput:
    if prompt_ids[0] == 20:
        return TokenOutput(token_ids=[], stop_reason="aborted", extra_fields={"global_steps": 3})
    return answer(prompt_ids)


async def broken(prompt_ids: list[int]) -> TokenOutput:
    if prompt_ids[0] == 20:
        raise RuntimeError("the engine is dead")
    return answer(prompt_ids)


async def timed_out(prompt_ids: list[int]) -> TokenOutput:
    if prompt_ids[0] == 20:
        raise TimeoutError("of the transport's own")
    return answer(prompt_ids)


async def slow(prompt_ids: list[int]) -> TokenOutput:
    await asyncio.sleep(11.0 if prompt_ids[0] == 20 else 9.0)
    return answer(prompt_ids)


@pytest.mark.parametrize("server", [of_vllm, of_sglang])
def test_the_log_probability_of_a_target_is_at_the_place_that_verl_puts_it(server: Callable[..., dict]) -> None:
    async def play(prompt_ids: list[int]) -> TokenOutput:
        return TokenOutput(token_ids=[2], stop_reason="completed", extra_fields=server(prompt_ids, 0))

    client, unscored = Client(play), Counter[str]()
    assert asyncio.run(teacher_logprobs(client, ITEMS, unscored=unscored)) == [expected(one) for one in ITEMS]
    assert not unscored and len({request for request, _, _ in client.asked}) == len(ITEMS)
    assert [ids for _, ids, _ in client.asked] == [list(one.teacher_ids) for one in ITEMS]
    assert all(params == {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0} for _, _, params in client.asked)


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (aborted, "aborted"),
        (broken, "failed"),
        (timed_out, "failed"),
        (slow, "late"),
        (changed("prompt_logprobs", lambda _: None), "no_logprobs"),
        (changed("prompt_ids", lambda _: None), "no_logprobs"),
        (changed("prompt_logprobs", lambda found: found[1:]), "no_logprobs"),
        (changed("prompt_logprobs", lambda found: [one[0] for one in found]), "no_logprobs"),
        (changed("prompt_logprobs", lambda found: [[] for _ in found]), "no_logprobs"),
        (changed("prompt_logprobs", lambda found: [[None] for _ in found]), "no_logprobs"),
        (changed("prompt_logprobs", lambda found: [[-math.inf] for _ in found]), "not_finite"),
        (changed("prompt_logprobs", lambda found: [[math.nan] for _ in found]), "not_finite"),
        (changed("prompt_ids", lambda found: [found[-1], *found[:-1]]), "other_ids"),
        (changed("prompt_ids", lambda found: [[99], *found[1:]]), "other_ids"),
    ],
)
@simulated
async def test_a_row_that_cannot_be_scored_is_left_out_alone_and_counted(play: Play, reason: str) -> None:
    unscored = Counter[str]()
    found = await teacher_logprobs(Client(play), ITEMS, unscored=unscored, limits=RequestLimits(generate_s=10.0))
    assert found == [expected(ITEMS[0]), None, expected(ITEMS[2]), expected(ITEMS[3])]
    assert unscored == {reason: 1}


@simulated
async def test_a_row_that_is_longer_than_the_server_takes_is_not_sent() -> None:
    client, unscored = Client(at_once), Counter[str]()
    rows = [item(*range(10, 17)), item(*range(20, 28))]
    found = await teacher_logprobs(client, rows, unscored=unscored, limits=RequestLimits(longest=7))
    assert found == [expected(rows[0]), None] and unscored == {"too_long": 1} and len(client.asked) == 1


@simulated
async def test_requests_run_side_by_side_and_at_most_so_many_at_once() -> None:
    async def second_long(prompt_ids: list[int]) -> TokenOutput:
        await asyncio.sleep(1.0)
        return answer(prompt_ids)

    rows = [item(*range(start, start + 7)) for start in range(10)]
    for most, took_s in ((10, 1.0), (4, 3.0), (1, 10.0)):
        client, began = Client(second_long), asyncio.get_running_loop().time()
        limits = RequestLimits(at_once=most, generate_s=1.5)  # the wait for the others does not count
        found = await teacher_logprobs(client, rows, unscored=Counter(), limits=limits)
        assert found == [expected(one) for one in rows] and client.most == most
        assert math.isclose(asyncio.get_running_loop().time() - began, took_s)


@simulated
async def test_cancelling_ends_all_requests() -> None:
    async def forever(prompt_ids: list[int]) -> TokenOutput:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    client, unscored = Client(forever), Counter[str]()
    scoring = asyncio.create_task(teacher_logprobs(client, ITEMS, unscored=unscored))
    await asyncio.sleep(1.0)
    assert client.running == len(ITEMS)
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert client.running == 0 and not unscored


@pytest.mark.parametrize(("given", "name"), [({"at_once": 0}, "at_once"), ({"generate_s": 0.0}, "generate_s")])
def test_limits_that_allow_nothing_are_refused(given: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0"):
        RequestLimits(**given)


def saying(**texts: str) -> Client:
    """Return a client that continues the prompt ``[n]`` with the n-th text."""
    said = list(texts.values())

    async def play(prompt_ids: list[int]) -> TokenOutput:
        ids = TOKENIZER.encode(said[prompt_ids[0]] + END, add_special_tokens=False)
        return TokenOutput(token_ids=ids, stop_reason="completed")

    return Client(play)


def called(name: str, **arguments: Any) -> str:
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


def test_calls_of_a_sampled_turn_are_those_that_the_student_could_make() -> None:
    client = saying(
        one="I look." + called("read", path="red") + called("read", path="blue"),
        none="I do not know.",
        cut=called("read", path="red")[:-9],
        unreadable='<tool_call>{"name": "read", "arguments": "red"}</tool_call>',
    )
    unsampled = Counter[str]()
    found = asyncio.run(
        sampled_calls(client, [[0], [1], [2], [3]], parse=TURNS.message, sampling_params=SAMPLING, unsampled=unsampled)
    )
    assert found == [[("read", {"path": "red"}), ("read", {"path": "blue"})], [], [], []] and not unsampled
    assert all(params == SAMPLING for _, _, params in client.asked)


@simulated
async def test_a_context_without_a_turn_is_left_out_alone_and_counted() -> None:
    async def parse(ids: Any) -> dict[str, Any]:
        if ids == [30]:
            raise RecursionError("too deep")
        return {"role": "assistant", "content": ""}

    async def play(prompt_ids: list[int]) -> TokenOutput:
        if prompt_ids[0] == 40:
            await asyncio.sleep(20.0)
        return TokenOutput(token_ids=prompt_ids, stop_reason="aborted" if prompt_ids[0] == 20 else "completed")

    unsampled = Counter[str]()
    found = await sampled_calls(
        Client(play),
        [[10], [20], [30], [40], [50, 51, 52]],
        parse=parse,
        sampling_params=SAMPLING,
        unsampled=unsampled,
        limits=RequestLimits(longest=2, generate_s=10.0),
    )
    assert found == [[], None, None, None, None]
    assert unsampled == {"aborted": 1, "unread": 1, "late": 1, "too_long": 1}


def test_a_parsers_stops_are_added_to_those_of_the_run() -> None:
    parser = SimpleNamespace(stop_token_ids=[7])
    turns = TurnParser(parser, TOKENIZER, [])
    assert turns.stopping({"top_p": 0.9, "stop_token_ids": [9, 7]}) == {"top_p": 0.9, "stop_token_ids": [7, 9]}
    assert turns.ends == {7, TOKENIZER.eos_token_id} and TURNS.stopping(SAMPLING) == SAMPLING


@pytest.fixture
def scorers() -> Iterator[Callable[..., Scorer]]:
    made: list[Scorer] = []

    def make(client: Client, **limits: Any) -> Scorer:
        made.append(Scorer(client, TURNS, sampling_params=SAMPLING, limits=RequestLimits(**limits)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def test_a_scorer_asks_for_a_caller_without_an_event_loop(scorers: Callable[..., Scorer]) -> None:
    threads = set()

    async def play(prompt_ids: list[int]) -> TokenOutput:
        threads.add((threading.current_thread(), asyncio.get_running_loop()))
        if prompt_ids == [0]:
            ids = TOKENIZER.encode(called("read", path="red"), add_special_tokens=False)
            return TokenOutput(token_ids=ids, stop_reason="completed")
        return await broken(prompt_ids)

    scorer = scorers(Client(play), longest=7)
    assert scorer.score(ITEMS) == [expected(ITEMS[0]), None, expected(ITEMS[2]), expected(ITEMS[3])]
    assert scorer.sample([[0], [0] * 8]) == [[("read", {"path": "red"})], None]
    assert scorer.score([]) == [] and scorer.sample([]) == []
    assert (scorer.unscored, scorer.unsampled) == ({"failed": 1}, {"too_long": 1})
    ((thread, _),) = threads
    assert thread is not threading.current_thread()
    scorer.close()
    scorer.close()
    assert not thread.is_alive()
    for ask in (scorer.score, scorer.sample):
        with pytest.raises(RuntimeError, match="closed"):
            ask([])


def test_closing_a_scorer_ends_what_it_asks(scorers: Callable[..., Scorer]) -> None:
    asks = threading.Event()

    async def forever(prompt_ids: list[int]) -> TokenOutput:
        asks.set()
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    client = Client(forever)
    scorer = scorers(client)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        scoring = pool.submit(scorer.score, ITEMS[:1])
        asks.wait()
        scorer.close()
        with pytest.raises(concurrent.futures.CancelledError):
            scoring.result()
    assert client.running == 0


def test_the_scripted_servers_answer_is_a_forward_pass_of_its_model(tmp_path: Path) -> None:
    from tests.verl.cpu_plugin import ScriptedServer

    torch.set_num_threads(1)
    TOKENIZER.save_pretrained(tmp_path)
    model = tiny_model(TOKENIZER, seed=5)
    model.save_pretrained(tmp_path)
    server = ScriptedServer(str(tmp_path))

    class Direct:
        async def generate(self, request_id: str, **given: Any) -> TokenOutput:
            return await server.generate(**given)

    ids = TOKENIZER.encode("One of red, green, blue holds a word. Submit it.", add_special_tokens=False)
    site = item(*ids, first=4)
    unscored = Counter[str]()
    (found,) = asyncio.run(teacher_logprobs(Direct(), [site], unscored=unscored))
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    plain = [float(logprobs[p, token]) for p, token in zip(site.teacher_positions, site.target_ids, strict=True)]
    assert found is not None and not unscored and len(set(plain)) == len(plain)
    assert found == pytest.approx(plain, abs=1e-5)
    assert not server.asked  # a scripted turn is none the later for it
