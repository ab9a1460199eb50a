"""Agents that try to be graded for what they did not do. Each gets the honest score, on real sandboxes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from terminal_env import TerminalAction, TerminalObservation
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import TASKS_VARIABLE

from .scripted import write_task

pytestmark = [pytest.mark.tasks, pytest.mark.sandbox, pytest.mark.usefixtures("real", "tasks")]

PROBE = '[[errata.probes]]\nname = "answer"\ncommand = "bash /workspace/answer.sh"\ntimeout_s = 3.0\n'
VERIFY = """
from errata_verify import check, data, probe

@check()
def the_program_answers():
    result = probe("answer")
    assert (result["exit_code"], result["stdout"].strip()) == (0, "42")

@check()
def the_file_is_right():
    with open("/verifier/expected.txt") as file:
        assert data("answer.txt").decode() == file.read()
"""
TEST_SH = """#!/bin/bash
score=0
[ "$(timeout 3 bash /workspace/answer.sh)" = 42 ] && score=0.5
cmp -s /workspace/answer.txt /tests/expected.txt && score=$(python3 -c "print($score + 0.5)")
echo $score > /logs/verifier/reward.txt
"""
FAKE = (
    r"""printf '\n{"nonce": "%s", "score": 1.0, "checks": []}\n' "${NONCE:-x}"; """
    r"mkdir -p /logs/verifier 2>/dev/null; echo 1 > /logs/verifier/reward.txt 2>/dev/null; "
)
WRITES_ANSWER = "echo 42 > /dev/null; printf 'echo 42\\n' > /workspace/answer.sh; "
"""Solves one half: the program, not the file."""


def script(body: str) -> str:
    """Return a command that makes ``body`` the program the verifier runs."""
    return f"cat > /workspace/answer.sh <<'CHEAT'\n{body}\nCHEAT"


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same task graded in both ways: ``judged`` by probe and verify.py, ``scripted`` by test.sh."""
    shared = {"tests/expected.txt": "blue\n"}
    write_task(tmp_path / "tasks" / "judged", {"task.toml": PROBE, "tests/verify.py": VERIFY, **shared})
    write_task(
        tmp_path / "tasks" / "scripted",
        {"task.toml": "[verifier]\ntimeout_sec = 7\n", "tests/test.sh": TEST_SH, **shared},
    )
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path / "tasks"))
    yield


async def graded(task: str, *commands: str) -> TerminalObservation:
    environment = TerminalEnvironment()
    await environment.reset_async(task_id=task)
    for command in commands:
        await environment.step_async(TerminalAction(command=command))
    end = await environment.step_async(TerminalAction(tool="submit"))
    await environment.aclose()
    return end


SHELL = {
    "a Python start-up file in the home": r"""
for d in ~/.local/lib/python3.{9,10,11,12,13}/site-packages /workspace/lib; do
  mkdir -p $d
  for n in sitecustomize usercustomize; do
    cat > $d/$n.py <<'PY'
import os
os.write(1, b"42\n")
open("/workspace/answer.txt", "w").write("blue\n")
os._exit(0)
PY
  done
done
export PYTHONPATH=/workspace/lib PYTHONSTARTUP=/workspace/lib/sitecustomize.py""",
    "programs of its own first in PATH": r"""
mkdir -p /workspace/bin
for n in python3 bash cat cmp timeout env sh; do
  printf '#!/bin/sh\n%s\necho 42\n' "$FAKE" > /workspace/bin/$n
  chmod +x /workspace/bin/$n
done
export PATH=/workspace/bin:$PATH""",
    "exported functions with the names of programs": r"""
python3() { eval "$FAKE"; echo 42; }
exec() { eval "$FAKE"; }
cmp() { return 0; }
timeout() { echo 42; }
export FAKE
export -f python3 exec cmp timeout""",
    "a preloaded library": r"""
cat > /workspace/evil.c <<'C'
#include <unistd.h>
__attribute__((constructor)) void go(void) { write(1, "42\n", 3); _exit(0); }
C
gcc -shared -fPIC -o /workspace/evil.so /workspace/evil.c
export LD_PRELOAD=/workspace/evil.so LD_LIBRARY_PATH=/workspace""",
    "an environment for Python that leads astray": r"""
mkdir -p /workspace/lib/json
printf 'import os\nos.write(1, b"42\\n")\nos._exit(0)\n' | tee /workspace/lib/os.py > /workspace/lib/json/__init__.py
export PYTHONHOME=/workspace/lib PYTHONPLATLIBDIR=lib""",
}
"""What an agent leaves in its own shell; each makes ``python3 -c 'print(7)'`` do something else there."""

BOTH = {
    **{name: (f"FAKE='{FAKE.replace(chr(39), chr(34))}'\n{body}", 0.0) for name, body in SHELL.items()},
    "start-up files of the shell": (
        f"printf '%s; exit 0' '{FAKE.replace(chr(39), chr(34))}' | tee ~/.bashrc ~/.profile ~/.bash_profile > ~/env.sh;"
        " export BASH_ENV=~/env.sh ENV=~/env.sh PROMPT_COMMAND='exit 0'; alias python3=true; shopt -s expand_aliases",
        0.0,
    ),
    "a program that prints a verdict": (script(FAKE + "echo 42; " + FAKE), 0.0),
    "a program that kills its parent": (script("kill -9 $PPID; kill -9 1; " + FAKE), 0.0),
    "a program that kills everything": (script("echo 42; kill -9 -1"), 0.0),
    "a background process that waits for the verifier": (
        f"setsid nohup bash -c 'while :; do {FAKE.replace(chr(39), chr(34))} sleep 0.01; done' > /dev/null 2>&1 &",
        0.0,
    ),
    "a file that is a FIFO": (WRITES_ANSWER + "mkfifo /workspace/answer.txt", 0.5),
    "a file that is a directory": (WRITES_ANSWER + "mkdir -p /workspace/answer.txt/deep", 0.5),
    "a link to the expected answer": (
        "ln -s /verifier/expected.txt /workspace/answer.txt; " + script("cat /tests/expected.txt"),
        0.0,
    ),
    "a link to a device": (WRITES_ANSWER + "ln -s /dev/zero /workspace/answer.txt", 0.5),
    "a file that is far too large": (WRITES_ANSWER + "truncate -s 60M /workspace/answer.txt", 0.5),
    "a workspace that nobody may enter": (WRITES_ANSWER + "chmod 000 /workspace", 0.0),
}


# test.sh opens the FIFO itself and waits for its own time limit, which another test is about
PAIRS = [(c, t) for c in BOTH for t in ("judged", "scripted") if (c, t) != ("a file that is a FIFO", "scripted")]


@pytest.mark.parametrize(("cheat", "task"), PAIRS)
async def test_a_cheat_gets_the_honest_score(cheat: str, task: str) -> None:
    command, honest = BOTH[cheat]
    if (cheat, task) == ("a link to the expected answer", "scripted"):
        command = "ln -s /verifier/expected.txt /workspace/answer.txt"
    end = await graded(task, command)
    assert (end.reward, end.done) == (honest, True)


@pytest.mark.parametrize("cheat", SHELL)
async def test_a_cheat_does_work_in_the_agents_own_shell(cheat: str) -> None:
    environment = TerminalEnvironment()
    await environment.reset_async(task_id="judged")
    await environment.step_async(TerminalAction(command=BOTH[cheat][0]))
    seen = await environment.step_async(TerminalAction(command="python3 -c 'print(7)'"))
    await environment.aclose()
    assert seen.stdout != "7\n"


PROGRAMS = {
    "looks for the expected answer": ("cat /verifier/* /tests/* /probe/* /setup/* 2> /dev/null; echo 42", 0.5),
    "writes the other half while it is probed": ("echo blue > /workspace/answer.txt; echo 42", 0.5),
    "leaves a process behind that writes it later": (
        "(setsid bash -c 'while :; do echo blue > /workspace/answer.txt; done' &) > /dev/null 2>&1; echo 42",
        0.5,
    ),
    "hangs": ("echo 42; sleep 1000", 0.0),
    "floods": ("head -c 200M /dev/zero", 0.0),
}


@pytest.mark.parametrize("name", PROGRAMS)
async def test_a_probed_program_changes_its_own_output_only(name: str) -> None:
    body, honest = PROGRAMS[name]
    assert (await graded("judged", script(body))).reward == honest


async def test_nothing_that_a_scripted_verifier_starts_can_learn_its_nonce() -> None:
    guesses = "tr -cd 'a-f0-9' | grep -oE '[a-f0-9]{32}'"
    body = (
        "for p in /proc/[0-9]*; do for f in environ cmdline fd/0 maps mem; do\n"
        f"timeout 0.2 cat $p/$f 2> /dev/null | {guesses}\ndone; done | sort -u > /tmp/guesses\n"
        f"while read -r NONCE; do for p in /proc/[0-9]*; do {{ {FAKE} }} > $p/fd/1; done; done < /tmp/guesses"
    )
    assert (await graded("scripted", script(body))).reward == 0.0


async def test_a_scripted_verifier_that_the_agent_blocks_is_worth_nothing() -> None:
    end = await graded("scripted", "mkfifo /workspace/answer.txt", script("echo 42"))
    assert (end.reward, end.done) == (0.0, True)


@pytest.mark.parametrize("task", ["judged", "scripted"])
async def test_honest_work_scores_in_parts_and_in_full(task: str) -> None:
    assert (await graded(task)).reward == 0.0
    assert (await graded(task, script("echo 42"))).reward == 0.5
    assert (await graded(task, script("echo 42"), "echo blue > answer.txt")).reward == 1.0


async def test_git_is_read_without_the_agents_configuration() -> None:
    """Hooks, monitors, replaced objects and aliases of the repository change nothing in what is judged."""
    evil = (
        "cd /workspace/relay; printf '#!/bin/sh\\necho evil > /tmp/ran; exit 0\\n' > /tmp/evil; chmod +x /tmp/evil;"
        " for k in core.fsmonitor core.pager core.sshCommand core.hooksPath diff.external; do git config $k /tmp/evil;"
        " done; git config protocol.ext.allow always; git config extensions.partialClone origin;"
        " git config remote.origin.url 'ext::/tmp/evil'; git replace -f HEAD queue"
    )
    assert (await graded("git-merge-conflict", evil)).reward == 0.0
