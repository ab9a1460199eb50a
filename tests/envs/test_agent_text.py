"""What the agent reads, and what it must never read."""

from __future__ import annotations

import subprocess
import sys

import pytest

from errata_protocol.markers import HINT_TEMPLATE_KEYS, Detection, ErrorKind, ErrorSite
from terminal_env import SPEC, TerminalObservation, agent_text
from tests.hangs import HANGS_S


def test_the_instruction_is_what_the_agent_reads_first() -> None:
    assert agent_text(TerminalObservation(tool="reset", instruction="Sort it.", cwd="/workspace")) == "Sort it."


def test_a_bare_shell_says_where_it_stands() -> None:
    assert agent_text(TerminalObservation(tool="reset", cwd="/workspace")) == "A shell is open in /workspace."


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tool": "run", "stdout": "a\nb\n", "exit_code": 0}, "a\nb\n[exit 0]"),
        ({"tool": "run", "stdout": "no newline", "exit_code": 3}, "no newline\n[exit 3]"),
        ({"tool": "run", "stdout": "o", "stderr": "e", "exit_code": 1}, "o\n[stderr]\ne\n[exit 1]"),
        ({"tool": "run", "exit_code": 0}, "[exit 0]"),
        ({"tool": "run", "stdout": "x\n", "timed_out": True}, "x\n[killed: time limit]"),
        ({"tool": "run", "timed_out": True, "time_limit_s": 30.0}, "[killed: time limit of 30 s]"),
        ({"tool": "run", "timed_out": True, "time_limit_s": 0.5}, "[killed: time limit of 0.5 s]"),
        (
            {"tool": "run", "exit_code": 137, "limit_hit": "memory", "killed_background": ["sleep", "nc"]},
            "[limit reached: memory]\n[killed when the command ended: sleep, nc]\n[exit 137]",
        ),
        (
            {"tool": "run", "stdout": "big", "truncated": True, "exit_code": 0},
            "big\n[truncated: part of the text is left out]\n[exit 0]",
        ),
        ({"tool": "read_file", "content": "text\n"}, "text"),
        ({"tool": "read_file", "content": ""}, "[empty file]"),
        ({"tool": "read_file", "stderr": "x: No such file or directory"}, "[stderr]\nx: No such file or directory"),
        ({"tool": "write_file"}, "[written]"),
        ({"tool": "submit", "done": True, "reward": 0.75}, "[submitted]"),
        ({"tool": "rum", "stderr": "no tool 'rum'"}, "[stderr]\nno tool 'rum'"),
    ],
)
def test_each_call_has_one_stable_text(fields: dict[str, object], text: str) -> None:
    observation = TerminalObservation(**fields)
    assert agent_text(observation) == text
    assert agent_text(observation.model_dump(mode="json")) == text, "decoded payloads read the same"


@pytest.mark.parametrize("kind", list(ErrorKind))
def test_no_marker_hint_key_or_reward_is_ever_read(kind: ErrorKind) -> None:
    plain = TerminalObservation(tool="run", stdout="out", stderr="err", exit_code=2, reward=0.0)
    site = ErrorSite(file="secret_site.py", line=3, message="secret message")
    marked = plain.with_detection(Detection.of(kind, site)).model_copy(update={"reward": 0.625, "duration_s": 9.5})
    assert agent_text(marked) == agent_text(plain)
    assert HINT_TEMPLATE_KEYS[kind] not in agent_text(marked)


def test_the_tools_are_described_by_name_with_closed_schemas() -> None:
    assert [tool["name"] for tool in SPEC.tools] == ["run", "write_file", "read_file", "submit"]
    for tool in SPEC.tools:
        assert set(tool["parameters"]["properties"]) <= set(SPEC.action_cls.model_fields)
        assert tool["parameters"]["additionalProperties"] is False


def test_importing_the_package_loads_neither_server_nor_trainer() -> None:
    code = (
        "import sys, terminal_env\n"
        "assert not {'errata_server', 'fastapi', 'torch', 'openenv'} & set(sys.modules), 'at import'\n"
        "terminal_env.SPEC, terminal_env.TerminalEnv, terminal_env.agent_text\n"
        "assert not {'errata_server', 'torch'} & set(sys.modules), 'after use'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert done.returncode == 0, done.stderr


def test_every_exported_name_can_be_had() -> None:
    import terminal_env

    for name in terminal_env.__all__:
        assert getattr(terminal_env, name) is not None
    with pytest.raises(AttributeError):
        _ = terminal_env.nothing
