"""Harbor-style tasks on real sandboxes, from set-up to reward."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed
from terminal_env import TerminalAction
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import TASKS_VARIABLE

from .scripted import write_task

pytestmark = [pytest.mark.tasks, pytest.mark.sandbox, pytest.mark.usefixtures("real")]
DONE = TerminalAction(tool="submit")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TerminalEnvironment:
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path / "tasks"))
    return TerminalEnvironment()


def harbor(tmp_path: Path, test_sh: str, **files: str) -> None:
    write_task(tmp_path / "tasks" / "t", {"tests/test.sh": test_sh, **files})


async def test_pytest_in_the_tests_directory_decides(tmp_path: Path, environment: TerminalEnvironment) -> None:
    harbor(
        tmp_path,
        "#!/bin/bash\npython3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py\n"
        "if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi\n",
        **{
            "tests/test_outputs.py": "def test_hello():\n    assert open('hello.txt').read() == 'Hello, world!\\n'\n",
            "environment/Dockerfile": "FROM ubuntu\nWORKDIR /workspace\nCOPY bin bin/\n",
            "environment/bin/tool.sh": "echo tool\n",
        },
    )
    await environment.reset_async(task_id="t")
    seen = await environment.step_async(TerminalAction(command="ls -A . bin; echo 'Hello, world!' > hello.txt"))
    assert seen.stdout.split() == [".:", "bin", "bin:", "tool.sh"]
    assert (await environment.step_async(DONE)).reward == 1.0
    await environment.reset_async(task_id="t")
    assert (await environment.step_async(DONE)).reward == 0.0


PYTEST = "python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py && echo 1 > /logs/verifier/reward.txt"


async def test_modules_in_the_workspace_cannot_take_over_the_test_runner(
    tmp_path: Path, environment: TerminalEnvironment
) -> None:
    harbor(
        tmp_path,
        f"echo 0 > /logs/verifier/reward.txt; cat /dev/null; {PYTEST}",
        **{"tests/test_outputs.py": "def test_it():\n    assert False\n"},
    )
    await environment.reset_async(task_id="t")
    evil = "import os\\nos._exit(0)\\n"
    names = (
        "pytest _pytest pluggy iniconfig json argparse ast code pathlib unittest conftest sitecustomize usercustomize"
    )
    await environment.step_async(
        TerminalAction(
            command=f"for n in {names}; do printf '{evil}' > $n.py; mkdir -p p/$n; cp $n.py p/$n/__main__.py; done;"
            " printf '[pytest]\\naddopts = -p json --collect-only\\n' > pytest.ini; mv p/pytest p/_pytest ."
        )
    )
    assert (await environment.step_async(TerminalAction(command="python3 -m pytest --version"))).stdout == ""
    assert (await environment.step_async(DONE)).reward == 0.0


async def test_tests_and_programs_find_the_agents_own_modules(tmp_path: Path, environment: TerminalEnvironment) -> None:
    """Also one with the name of a system's module, where a program of the agent imports it."""
    harbor(
        tmp_path,
        f"cd sub && [ $(python3 main.py) = own ] && cd .. && {PYTEST} || echo 0 > /logs/verifier/reward.txt",
        **{
            "tests/test_outputs.py": "import helper, mine\n\ndef test_it():\n    assert mine.X + helper.Y == 3\n",
            "tests/helper.py": "Y = 2\n",
        },
    )
    await environment.reset_async(task_id="t")
    await environment.step_async(
        TerminalAction(
            command="echo 'X = 1' > mine.py; mkdir sub; echo 'word = \"own\"' > sub/queue.py;"
            " printf 'import queue\\nprint(queue.word)\\n' > sub/main.py"
        )
    )
    assert (await environment.step_async(DONE)).reward == 1.0


@pytest.mark.parametrize(
    ("test_sh", "reward"),
    [
        ("echo 0.25 > /logs/verifier/reward.txt; exit 1", 0.25),
        ("printf 1e-1 > /logs/verifier/reward.txt", 0.1),
        ("printf 1.0000000000000002 > /logs/verifier/reward.txt", 1.0),
        ("echo > /logs/verifier/reward.txt; echo 0.5 > /logs/verifier/reward.json", 0.5),
        ("echo 0.25 > /logs/verifier/reward.txt; echo 0.5 > /logs/verifier/reward.json", 0.25),
        ('echo \'{"reward": 0.5, "speed": 3}\' > /logs/verifier/reward.json', 0.5),
        ("echo 0.75 > /logs/verifier/reward.txt; (while :; do echo 1 > /tmp/x; done) &", 0.75),
        ('[ "$MODE$AGENT@$PWD" = strict@/workspace ] && echo 1 > /logs/verifier/reward.txt', 1.0),
    ],
)  # fmt: skip
async def test_the_reward_file_is_read(
    tmp_path: Path, environment: TerminalEnvironment, test_sh: str, reward: float
) -> None:
    harbor(tmp_path, test_sh, **{"task.toml": '[verifier]\nenv = { MODE = "strict" }\n'})
    await environment.reset_async(task_id="t")
    await environment.step_async(TerminalAction(command="export AGENT=1; cd /tmp"))
    assert (await environment.step_async(DONE)).reward == reward


@pytest.mark.parametrize(
    "test_sh",
    [
        "exit 1",
        "sleep 60; echo 1 > /logs/verifier/reward.txt",
        "kill -9 $PPID",
    ],
)
async def test_a_script_that_gives_no_reward_is_a_failure_and_not_a_zero(
    tmp_path: Path, environment: TerminalEnvironment, test_sh: str
) -> None:
    harbor(tmp_path, test_sh, **{"task.toml": "[verifier]\ntimeout_sec = 2\n"})
    await environment.reset_async(task_id="t")
    with pytest.raises(EnvironmentFailed, match="verifier of task t is broken"):
        await environment.step_async(DONE)
    assert (await environment.step_async(TerminalAction(command="echo goes on"))).stdout == "goes on\n"


STARTED = "[ -e started ] || { echo 0 > /logs/verifier/reward.txt; exit; }\n"
"""A verifier that gives a verdict on the untouched start, so that a control run finds nothing wrong with it."""


@pytest.mark.parametrize(
    ("write", "said"),
    [
        ("echo 7 > reward.txt", r"score 7 is not between 0 and 1: .*max_score = 7"),
        ("echo -1 > reward.txt", "score -1 is not between 0 and 1: .* 0 for less than nothing$"),
        ("echo 1.001 > reward.txt", "score 1.001 is not between 0 and 1"),
        ("echo '{\"reward\": 10}' > reward.json", "score 10 is not between 0 and 1"),
        ("echo 100% > reward.txt", "reward.txt says '100%', which is no reward: write one number from 0 to 1"),
        ("echo soon > reward.txt", "reward.txt says 'soon'"),
        ("echo nan > reward.txt", "reward.txt says 'nan'"),
        ("echo inf > reward.txt", "reward.txt says 'inf'"),
        ("echo 1_0 > reward.txt", "reward.txt says '1_0'"),
        ("echo '{\"reward\": true}' > reward.json", "reward.json says"),
        ("echo '\"1\"' > reward.json", "reward.json says"),
        ("printf '1\n0\n' > reward.txt", r"reward.txt says '1\\n0'"),
        ("printf '\377' > reward.txt", "reward.txt says"),
        ("echo 1/1 > reward.txt; echo 1 > reward.json", "reward.txt says '1/1'"),
        ("echo '{\"a\": 1, \"b\": 1}' > reward.json", "reward.json says '{\"a\": 1, \"b\": 1}'"),
        ("echo '{\"reward\": null}' > reward.json", "reward.json says"),
        ("echo '{\"reward\": NaN}' > reward.json", "reward.json says"),
        ("echo '{\"reward\": 1' > reward.json", "reward.json says"),
        ("printf '1%0400d' > reward.json", "reward.json says"),
        ("printf '[%.0s' {1..60000} > reward.json", "reward.json says"),
    ],
)  # fmt: skip
async def test_a_score_is_never_bent_into_a_reward(
    tmp_path: Path, environment: TerminalEnvironment, write: str, said: str
) -> None:
    """No control run decides: that the start can be graded does not make such a score one of the agent's."""
    harbor(tmp_path, f"{STARTED}cd /logs/verifier; {write}")
    await environment.reset_async(task_id="t")
    await environment.step_async(TerminalAction(command="touch started"))
    with pytest.raises(EnvironmentFailed, match=f"verifier of task t is broken: .*{said}"):
        await environment.step_async(DONE)
    assert not environment.state.done


@pytest.mark.parametrize(
    "write", ["> reward.txt", "mkdir reward.txt", "ln -s /tests/test.sh reward.txt", "mkfifo reward.txt"]
)
async def test_a_reward_file_without_content_is_the_agents_fault_where_the_start_has_a_verdict(
    tmp_path: Path, environment: TerminalEnvironment, write: str
) -> None:
    harbor(tmp_path, f"{STARTED}cd /logs/verifier; {write}")
    await environment.reset_async(task_id="t")
    await environment.step_async(TerminalAction(command="touch started"))
    assert (await environment.step_async(DONE)).reward == 0.0
    assert environment.verdict and "reward file is empty or no regular file" in environment.verdict.detail


@pytest.mark.parametrize(("points", "reward"), [("0", 0.0), ("4", 0.4), ("10", 1.0), ("11", None), ("-1", None)])
async def test_points_are_divided_by_the_maximum_that_the_task_declares(
    tmp_path: Path, environment: TerminalEnvironment, points: str, reward: float | None
) -> None:
    toml = "[errata]\nmax_score = 10\n"
    harbor(tmp_path, f"{STARTED}echo {points} > /logs/verifier/reward.txt", **{"task.toml": toml})
    await environment.reset_async(task_id="t")
    await environment.step_async(TerminalAction(command="touch started"))
    if reward is None:
        with pytest.raises(EnvironmentFailed, match="is not between 0 and 10"):
            await environment.step_async(DONE)
    else:
        assert (await environment.step_async(DONE)).reward == reward


async def test_all_checks_of_a_verify_py_give_exactly_1(tmp_path: Path, environment: TerminalEnvironment) -> None:
    checks = "".join(f"@check(weight={w})\ndef c{n}(): ...\n" for n, w in enumerate([0.1, 0.2, 0.3, 0.7, 1e-9]))
    write_task(tmp_path / "tasks" / "t", {"tests/verify.py": f"from errata_verify import check\n{checks}"})
    await environment.reset_async(task_id="t")
    assert (await environment.step_async(DONE)).reward == 1.0


async def test_variables_of_the_task_reach_the_agent_and_the_verifier(
    tmp_path: Path, environment: TerminalEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADING_MODE", "strict")
    toml = '[environment.env]\nWORD = "blue"\n[verifier.env]\nMODE = "${GRADING_MODE}-${LEVEL:-2}"\n'
    test_sh = '[ "$WORD$MODE" = bluestrict-2 ]; echo $(( 1 - $? )) > /logs/verifier/reward.txt'
    harbor(tmp_path, test_sh, **{"task.toml": toml, "environment/Dockerfile": "FROM x\nENV WORD=red\n"})
    await environment.reset_async(task_id="t")
    assert (await environment.step_async(TerminalAction(command='echo "$WORD$MODE"'))).stdout == "blue\n"
    assert (await environment.step_async(DONE)).reward == 1.0


@pytest.mark.parametrize(
    "verify",
    [
        "import nothing_like_that",
        "from errata_verify import check",
        "from errata_verify import check\n@check()\ndef broken():\n    undefined_name\n",
        "while True: pass",
        "raise SystemExit(0)",
        "from errata_verify import check\n@check(needs=['a name'])\ndef f(): ...\n",
        "from errata_verify import check\n@check(weight=0)\ndef f(): ...\n",
        # the need fails here, and the mistake behind it shows all the same
        "from errata_verify import check\ndef no():\n    assert False\n"
        "@check(needs=[no])\ndef f():\n    undefined_name\n",
    ],
)
async def test_a_broken_verify_py_is_a_failure_and_not_a_zero(
    tmp_path: Path, environment: TerminalEnvironment, verify: str
) -> None:
    write_task(tmp_path / "tasks" / "t", {"tests/verify.py": verify, "task.toml": "[verifier]\ntimeout_sec = 2\n"})
    await environment.reset_async(task_id="t")
    with pytest.raises(EnvironmentFailed, match="verifier of task t is broken"):
        await environment.step_async(DONE)


NEEDS = """
from errata_verify import check, text

def plain():
    assert text("plain") == "1\\n"

@check(needs=[plain])
def works():
    assert text("works") == "1\\n"

@check(needs=[works])
def refuses():
    assert text("refuses") == "1\\n"

@check(weight=2)
def alone():
    assert text("alone") == "1\\n"
"""


@pytest.mark.parametrize(
    ("files", "score"),
    [
        ("refuses", 0.0),
        ("works refuses", 0.0),
        ("plain refuses", 0.0),
        ("plain works", 0.25),
        ("plain works refuses", 0.5),
        ("refuses alone", 0.5),
        ("plain works refuses alone", 1.0),
    ],
)
async def test_a_check_counts_only_with_all_that_it_needs(
    tmp_path: Path, environment: TerminalEnvironment, files: str, score: float
) -> None:
    write_task(tmp_path / "tasks" / "t", {"tests/verify.py": NEEDS})
    await environment.reset_async(task_id="t")
    await environment.step_async(TerminalAction(command=f"for f in {files}; do echo 1 > $f; done"))
    assert (await environment.step_async(DONE)).reward == score


async def test_verify_py_cannot_start_a_program_of_the_agent(tmp_path: Path, environment: TerminalEnvironment) -> None:
    verify = (
        "import os, subprocess\nfrom errata_verify import check\n"
        "@check()\ndef by_run():\n    subprocess.run(['/workspace/x'])\n"
        "@check()\ndef by_system():\n    os.system('/workspace/x')\n"
        "@check()\ndef of_the_system():\n    subprocess.run(['/usr/bin/true'], check=True)\n"
    )
    write_task(tmp_path / "tasks" / "t", {"tests/verify.py": verify})
    await environment.reset_async(task_id="t")
    await environment.step_async(TerminalAction(command="printf '#!/bin/sh\\nexit 0\\n' > x; chmod +x x"))
    assert (await environment.step_async(DONE)).reward == pytest.approx(1 / 3)


async def test_a_broken_set_up_is_a_failure_that_says_why(tmp_path: Path, environment: TerminalEnvironment) -> None:
    harbor(tmp_path, "true", **{"setup.sh": "echo preparing\nls /not/there\n"})
    with pytest.raises(EnvironmentFailed, match=r"setup.sh ended with 2: .*/not/there"):
        await environment.reset_async(task_id="t")


async def test_the_start_keeps_links_and_execute_bits_and_has_old_times(
    tmp_path: Path, environment: TerminalEnvironment
) -> None:
    harbor(
        tmp_path,
        "true",
        **{"environment/d/run me": "#!/bin/sh\necho ran\n", "setup.sh": "touch -d 2020-02-02 old; touch new\n"},
    )
    source = tmp_path / "tasks" / "t" / "environment"
    (source / "d" / "run me").chmod(0o700)
    (source / "link").symlink_to("d/run me")
    await environment.reset_async(task_id="t")
    seen = await environment.step_async(TerminalAction(command="./link; find . -printf '%p %m %TY\\n' | sort"))
    assert seen.stdout.splitlines() == [
        "ran", ". 755 2026", "./d 755 2026", "./d/run me 755 2026", "./link 777 2026", "./new 644 2026",
        "./old 644 2020",
    ]  # fmt: skip
