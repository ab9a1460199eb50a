"""Teachers on a chat server that is none of ours: `transformers serve`, with a model made and taught on the spot."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from errata_trainer.teachers import Action, AnswerCache, Ask, Budget, Prompter, TeacherPool, ToolCall, preferences
from errata_trainer.teachers.endpoint import ChatTeacher, Endpoint
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer
from terminal_env import SPEC

SAYS = '<tool_call>{"name": "run", "arguments": {"command": "ls  -l"}}</tool_call>' + END
PROMPTER = Prompter(SPEC.tools, SPEC.agent_text)
STATES = [({"role": "user", "content": text},) for text in ("List the files.", "What is here? Say it at once.")]
STUDENT = Action((ToolCall("run", {"command": "pwd"}),))


def taught(directory: Path) -> str:
    """Save a model that answers a prompt of ours with one tool call."""
    tokenizer = tiny_tokenizer([SAYS, PROMPTER.instruction, *(state[0]["content"] for state in STATES)])
    model = tiny_model(tokenizer).train()
    rows = []
    for state in STATES:
        prompt = PROMPTER.from_transcript(state)
        text = tokenizer.apply_chat_template(
            list(prompt.messages), tools=list(prompt.tools), add_generation_prompt=True, tokenize=False
        )
        asked, said = (tokenizer.encode(part, add_special_tokens=False) for part in (text, SAYS))
        rows.append((torch.tensor([asked + said]), torch.tensor([[-100] * len(asked) + said])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        ids, labels = rows[step % len(rows)]
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() < 0.005:
            break
    model.eval().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base URL and name of the model."""
    directory = tmp_path_factory.mktemp("served")
    model = taught(directory / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, "-c", "from transformers.cli.transformers import main; main()"]
    options = ["serve", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    log = directory / "log"
    with log.open("wb") as output:
        server = subprocess.Popen([*program, *options], stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + 100
        while not _healthy(port):
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)  # another project's process: nothing tells when its port is open
        yield f"http://127.0.0.1:{port}/v1", model
    finally:
        server.kill()
        server.wait(60)


def _healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False, timeout=5).is_success
    except httpx.TransportError:
        return False


def teachers(served: tuple[str, str], *names: str, **options: Any) -> list[ChatTeacher]:
    url, model = served
    return [
        ChatTeacher(Endpoint(model, url, None, name, max_tokens=64, seed=n, **options)) for n, name in enumerate(names)
    ]


def test_a_served_models_tool_calls_are_votes_and_a_second_run_costs_nothing(
    served: tuple[str, str], tmp_path: Path
) -> None:
    asks = [Ask(STUDENT, transcript=state) for state in STATES]
    budget = Budget(tokens=60_000)
    with TeacherPool(
        teachers(served, "a", "b"), PROMPTER, budget=budget, cache=AnswerCache(tmp_path), deadline_s=50
    ) as pool:
        ballots = pool.submit(asks).result(60)
    assert [ballot.vote.reason for ballot in ballots] == ["consensus"] * 2, [ballot.failures for ballot in ballots]
    (preference,) = preferences(ballots[0])
    assert preference.chosen == Action((ToolCall("run", {"command": "ls  -l"}),))
    assert ballots[0].vote.pairs[0].chosen == pool._keys.keyed(Action((ToolCall("run", {"command": "ls -l"}),)))
    spent = budget.spent.tokens
    assert 4 * 50 < spent < 4 * 2000, "what the server counted, not what was reserved"
    elsewhere = teachers(("http://127.0.0.1:9/v1", served[1]), "a", "b")
    with TeacherPool(elsewhere, PROMPTER, budget=Budget(tokens=0), cache=AnswerCache(tmp_path)) as again:
        assert [len(ballot.vote.pairs) for ballot in again.submit(asks).result(60)] == [1, 1]


def test_an_answer_that_is_cut_off_and_a_model_that_is_not_there_are_missing_votes(served: tuple[str, str]) -> None:
    url, model = served
    cut = ChatTeacher(Endpoint(model, url, None, "cut", max_tokens=2))
    other = ChatTeacher(Endpoint("no/such-model", url, None, "other"))
    with TeacherPool([cut, other], PROMPTER, deadline_s=50) as pool:
        (ballot,) = pool.submit([Ask(STUDENT, transcript=STATES[0])]).result(60)
    assert dict(ballot.failures) == {"cut": "truncated", "other": "refused_request"}
