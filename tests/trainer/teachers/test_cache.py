"""Answers on disk: by what they depend on, whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from errata_trainer.teachers import Answer, AnswerCache, Prompt, Prompter, RawCall, Spend, cache_key, says

PROMPT = Prompt(({"role": "user", "content": "état"},), ({"name": "run"},), version="1")
ANSWER = Answer("ü", (RawCall("run", '{"command": "ls"}'),), "tool_calls", Spend(0.5, 9), "m")
KEY = cache_key(PROMPT, {"model": "m", "temperature": 0.0})


def test_another_process_finds_the_answer(tmp_path: Path) -> None:
    AnswerCache(tmp_path).put(KEY, ANSWER)
    assert AnswerCache(tmp_path).get(KEY) == ANSWER
    assert AnswerCache(tmp_path / "other").get(KEY) is None


@pytest.mark.parametrize(
    ("prompt", "identity"),
    [
        (Prompt(({"role": "user", "content": "etat"},), PROMPT.tools, version="1"), {"model": "m", "temperature": 0.0}),
        (Prompt(PROMPT.messages, (), version="1"), {"model": "m", "temperature": 0.0}),
        (Prompt(PROMPT.messages, PROMPT.tools, version="2"), {"model": "m", "temperature": 0.0}),
        (PROMPT, {"model": "n", "temperature": 0.0}),
        (PROMPT, {"model": "m", "temperature": 0.5}),
    ],
)
def test_an_answer_depends_on_state_tools_version_model_and_sampling(
    tmp_path: Path, prompt: Prompt, identity: dict[str, Any]
) -> None:
    cache = AnswerCache(tmp_path)
    cache.put(KEY, ANSWER)
    assert cache.get(cache_key(prompt, identity)) is None


def test_where_a_prompt_was_read_from_makes_no_difference() -> None:
    one = Prompter().from_transcript([{"role": "user", "content": "a"}], cwd="/w")
    assert cache_key(one, {}) == cache_key(Prompt(one.messages, version="1", source="agent_text"), {})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"layout": 9, "key": {}, "answer": {}}', "null", "\0"])
def test_a_damaged_file_is_asked_for_again_and_counted(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    AnswerCache(tmp_path).put(KEY, ANSWER)
    (path,) = tmp_path.rglob("*.json")
    path.write_text(content)
    cache = AnswerCache(tmp_path)
    assert cache.get(KEY) is None
    assert cache.damaged == 1
    assert str(path) in caplog.text
    cache.put(KEY, ANSWER)
    assert AnswerCache(tmp_path).get(KEY) == ANSWER


def test_an_answer_to_something_else_is_not_taken(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    cache.put(KEY, ANSWER)
    (path,) = tmp_path.rglob("*.json")
    data = json.loads(path.read_text())
    data["key"]["state"] = "other"
    path.write_text(json.dumps(data))
    assert AnswerCache(tmp_path).get(KEY) is None


def test_memory_is_bounded_and_the_directory_is_not(tmp_path: Path) -> None:
    memory, disk = AnswerCache(kept=2), AnswerCache(tmp_path, kept=2)
    keys = [cache_key(PROMPT, {"n": n}) for n in range(3)]
    for cache in (memory, disk):
        for key in keys:
            cache.put(key, says("run"))
    assert [memory.get(key) is not None for key in keys] == [False, True, True]
    assert all(disk.get(key) is not None for key in keys)


WRITER = """
import sys
from errata_trainer.teachers import Answer, AnswerCache
cache = AnswerCache(sys.argv[1], kept=1)
print("ready", flush=True)
while True:
    for n in range(50):
        cache.put({"n": n}, Answer(text="x" * 20000 + str(n)))
"""


def test_processes_that_write_the_same_and_are_killed_leave_whole_answers(tmp_path: Path) -> None:
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, env=os.environ)
        for _ in range(2)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
        reader = AnswerCache(tmp_path, kept=1)
        found = 0
        while found < 500:
            for n in range(50):
                answer = reader.get({"n": n})
                assert answer is None or answer.text == "x" * 20000 + str(n)
                found += answer is not None
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    assert reader.damaged == 0
    for n in range(50):
        AnswerCache(tmp_path).get({"n": n})
    assert AnswerCache(tmp_path).damaged == 0
