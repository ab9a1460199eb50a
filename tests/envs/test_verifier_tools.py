"""test.sh of Harbor's kind on real sandboxes: graded without a network, and an error where a tool is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed
from terminal_env import TerminalAction, TerminalObservation
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import TASKS_VARIABLE

from . import harbor_style
from .harbor_style import REWARD, STYLES

pytestmark = [pytest.mark.tasks, pytest.mark.sandbox, pytest.mark.usefixtures("real")]
DONE = TerminalAction(tool="submit")
OUTPUTS = "def test_it():\n    assert open('/app/out.txt').read() == 'right\\n'\n"
RIGHT = "echo right > /app/out.txt"


@pytest.fixture
def tasks_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(TASKS_VARIABLE, str(tmp_path / "tasks"))
    return tmp_path / "tasks"


async def graded(task_id: str, command: str) -> TerminalObservation:
    environment = TerminalEnvironment()
    try:
        await environment.reset_async(task_id=task_id)
        await environment.step_async(TerminalAction(command=command))
        return await environment.step_async(DONE)
    finally:
        await environment.aclose()


@pytest.mark.parametrize("style", STYLES)
async def test_a_task_of_terminal_bench_is_solvable_and_worth_nothing_untouched(
    tasks_directory: Path, style: str
) -> None:
    root = harbor_style.write(tasks_directory / style, STYLES[style])
    assert (await graded(style, "true")).reward == 0.0
    assert (await graded(style, (root / "solution" / "solve.sh").read_text())).reward == 1.0


async def test_the_start_is_as_the_dockerfile_says(tasks_directory: Path) -> None:
    harbor_style.write(tasks_directory / "t", harbor_style.BROKEN_SCRIPT)
    environment = TerminalEnvironment()
    start = await environment.reset_async(task_id="t")
    assert start.cwd == "/app"
    command = (
        "cat /data/in/*.txt; echo $MODE $DATA_DIR; stat -c '%U %a %n' /app /app/bin/total /data/in/one.txt /srv/out; "
        "readlink /usr/local/bin/total; touch /app/x /data/x /srv/out/x && echo can; touch /usr/local/bin/x; "
        "find /app /data/in /srv -mindepth 1 -newermt @1767225600 -not -name x -not -path /srv/out"
    )
    seen = await environment.step_async(TerminalAction(command=command))
    assert seen.stdout.splitlines() == [
        "1", "2", "39", "strict /data/in", "agent 755 /app", "agent 755 /app/bin/total", "agent 644 /data/in/one.txt",
        "agent 755 /srv/out", "/app/bin/total", "can",
    ]  # fmt: skip
    assert "Permission denied" in seen.stderr or "Read-only" in seen.stderr
    await environment.aclose()


def script(directory: Path, test_sh: str, outputs: str = OUTPUTS, instruction: str = "Write /app/out.txt.\n") -> None:
    harbor_style.write_task(
        directory / "t",
        {
            "instruction.md": instruction,
            "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
            "tests/test.sh": test_sh + REWARD,
            "tests/test_outputs.py": outputs,
        },
    )


@pytest.mark.parametrize(
    "test_sh",
    [
        "apt-get update && apt-get install -y curl jq python3 ca-certificates\npytest /tests/test_outputs.py -rA\n",
        "wget -qO- https://astral.sh/uv/install.sh | sh\nuvx pytest@8.4.1 /tests/test_outputs.py\n",
        "curl -LsSf -o i.sh https://astral.sh/uv/install.sh && sh i.sh && $HOME/.local/bin/uvx pytest /tests\n",
        "uvx --from pytest==8.4.1 --with requests --with pytest-timeout pytest --timeout 60 /tests/test_outputs.py\n",
        "uv venv /tmp/v && . /tmp/v/bin/activate && uv pip install 'pytest>=8,<9' && pytest /tests/test_outputs.py\n",
        "uv pip install --system pytest==8.4.1 pytest-json-ctrf==0.3.5\n"
        "pytest /tests/test_outputs.py --ctrf /logs/verifier/ctrf.json\n"
        "jq -e '.results.summary.failed == 0' /logs/verifier/ctrf.json\n",
        "uv init && uv add pytest==8.4.1 && uv run pytest /tests/test_outputs.py\n",
        "python3 -m venv /tmp/v && /tmp/v/bin/pip install pytest && /tmp/v/bin/python -m pytest /tests\n",
        "python -m pip install -q pytest==8.4.1\nPYTHONPATH=/app python3 -m pytest /tests/test_outputs.py\n",
        "sudo -E pip3 install requests && python3 -c 'import requests' && cd /tests && pytest\n",
        "printf 'pytest==8.4.1 # runner\\n-i https://pypi.org/simple\\n' > r.txt; pip install -r r.txt && "
        "python3 -m pytest /tests/test_outputs.py\n",
        "uv run --with pytest==8.4.1 -m pytest /tests/test_outputs.py\n",
        "python3 -m unittest discover -s /tests -p 'unit*.py'; pytest /tests/test_outputs.py\n",
        "bash /tests/inner.sh\n",
    ],
)  # fmt: skip
async def test_ways_to_run_pytest_work_without_a_network(tasks_directory: Path, test_sh: str) -> None:
    script(tasks_directory, test_sh)
    (tasks_directory / "t" / "tests" / "inner.sh").write_text(
        "uvx --with pytest==8.4.1 pytest /tests/test_outputs.py\n"
    )
    assert (await graded("t", "true")).reward == 0.0
    assert (await graded("t", RIGHT)).reward == 1.0


@pytest.mark.parametrize(
    ("test_sh", "outputs", "missing"),
    [
        ("uvx -w pytest==8.4.1 -w pandas==2.2.3 pytest /tests\n", OUTPUTS, r"pandas==2\.2\.3"),
        ("uvx -w pytest==7.4.4 pytest /tests\n", OUTPUTS, r"pytest==7\.4\.4"),
        ("apt-get install -y postgresql-client && pytest /tests\n", OUTPUTS, "postgresql-client"),
        ("uv venv .v && . .v/bin/activate && uv pip install pytest numpy && uv run pytest /tests\n", OUTPUTS, "numpy"),
        ("curl -fsSL https://example.com/data -o /tmp/data && pytest /tests\n", OUTPUTS, "https://example.com/data"),
        ("git clone https://github.com/a/b /tmp/b && pytest /tests\n", OUTPUTS, "https://github.com/a/b"),
        ("wget -q https://example.com/x && pytest /tests\n", OUTPUTS, "wget"),
        ("bats /tests/x.bats\n", OUTPUTS, "bats"),
        ("frobnicate-verify /app 2>/dev/null\n", OUTPUTS, "frobnicate-verify"),
        ("/usr/local/bin/uvx pytest /tests\n", OUTPUTS, "/usr/local/bin/uvx"),
        ("npm ci && npm test\n", OUTPUTS, "npm"),
        ("pytest -p xdist -n 4 /tests\n", OUTPUTS, "pytest"),
        ("pytest --no-such-option /tests\n", OUTPUTS, "no-such-option"),
        ("pytest /tests/test_other.py\n", OUTPUTS, "test_other"),
        ("pytest /tests/test_outputs.py\n", "x = 1\n", "found no tests"),
        ("pytest /tests\n", "import numpy\n" + OUTPUTS, "numpy"),
        ("pytest /tests\n", "def test_it():\n    import pandas\n", "pandas"),
        ("pytest /tests\n", "import subprocess\n\ndef test_it():\n    subprocess.run(['node', 'x.js'])\n", "node"),
        ("pytest /tests\n", "def test_it(mocker):\n    pass\n", "mocker"),
        ("python3 /tests/test_outputs.py\n", "import yaml_of_ours\n", "yaml_of_ours"),
        ("python3 /tests/test_outputs.py\n", "import subprocess\nsubprocess.run(['cargo', 'test'])\n", "cargo"),
        ("python3 - <<'EOF'\nimport scipy\nEOF\n", OUTPUTS, "scipy"),
        ("python3 -c 'import scipy'\n", OUTPUTS, "scipy"),
        ("cp /tests/test_outputs.py . && pytest test_outputs.py\n", "import numpy\n" + OUTPUTS, "numpy"),
        ("pytest /tests\n", "import subprocess\nsubprocess.run(['node'])\n" + OUTPUTS, "node"),
    ],
)  # fmt: skip
async def test_a_script_that_misses_a_tool_is_an_error_also_where_it_writes_a_zero(
    tasks_directory: Path, test_sh: str, outputs: str, missing: str
) -> None:
    script(tasks_directory, test_sh, outputs)
    for command in ("true", RIGHT):
        with pytest.raises(EnvironmentFailed, match=missing):
            await graded("t", command)


async def test_a_full_score_stands_also_where_something_was_missing(tasks_directory: Path) -> None:
    script(tasks_directory, "pip install torch; pytest /tests\n")
    assert (await graded("t", RIGHT)).reward == 1.0
    with pytest.raises(EnvironmentFailed, match="torch"):
        await graded("t", "true")


async def test_a_script_without_a_reward_file_names_the_missing_tool(tasks_directory: Path) -> None:
    script(tasks_directory, "set -e\napt-get install -y nodejs\n")
    with pytest.raises(EnvironmentFailed, match=r"cannot be graded here.*nodejs.*errata tasks check"):
        await graded("t", RIGHT)


@pytest.mark.parametrize(
    ("test_sh", "outputs"),
    [
        ("greet-tool > /dev/null\n", OUTPUTS),
        ("pytest /tests\n", "import subprocess\n\ndef test_it():\n    subprocess.run(['greet-tool'], check=True)\n"),
        ("PYTHONPATH=/app pytest /tests\n", "import greetings\n\ndef test_it():\n    assert greetings.X\n"),
        ("PYTHONPATH=/app python3 /tests/test_outputs.py\n", "import greetings\n"),
        ("pytest /app/test_mine.py\n", OUTPUTS),
        ("/app/run.sh\n", OUTPUTS),
    ],
)
async def test_what_the_task_asks_the_agent_for_is_not_a_tool(
    tasks_directory: Path, test_sh: str, outputs: str
) -> None:
    words = "Write the command greet-tool, the module greetings.py, /app/run.sh and /app/test_mine.py.\n"
    script(tasks_directory, test_sh, outputs, words)
    assert (await graded("t", "true")).reward == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "#!/bin/bash\nuvx --with nothing-like-it pytest; apt-get install -y nothing; nothing-like-it; exit 1\n",
        "#!/bin/bash\n(setsid bash -c 'sleep 0.2; /verifier/bin/uvx nothing-like-it' &); sleep 1; exit 1\n",
        "#!/usr/bin/python3\nimport subprocess\nsubprocess.run(['curl', 'https://example.com'])\nraise SystemExit(1)\n",
        "#!/usr/bin/python3\nimport json, os, socket\ns = socket.socket(socket.AF_UNIX)\n"
        "s.connect(os.environ['ERRATA_VERIFIER_SOCKET'])\n"
        "s.sendall(json.dumps({'kind': 'tool', 'name': 'x', 'text': 'x'}).encode())\ns.shutdown(1)\ns.recv(1)\n"
        "raise SystemExit(1)\n",
        "#!/usr/bin/python3\nimport no_such_module\n",
        "#!/bin/bash\npython3 -m pytest --no-such-option; exit 1\n",
        "#!/bin/bash\necho '/tests/test.sh: line 1: /usr/bin/uvx: No such file or directory' >&2; exit 1\n",
    ],
)
@pytest.mark.parametrize(
    ("test_sh", "outputs"),
    [
        ("/app/run.sh\n", OUTPUTS),
        (
            "pytest -s /tests\n",
            "import subprocess\n\ndef test_it():\n    subprocess.run(['/app/run.sh'], check=True)\n",
        ),
    ],
)
async def test_a_program_of_the_agent_cannot_turn_a_zero_into_an_error(
    tasks_directory: Path, program: str, test_sh: str, outputs: str
) -> None:
    script(tasks_directory, test_sh, outputs, "Write /app/run.sh.\n")
    write = f"cat > /app/run.sh <<'EOT'\n{program}EOT\nchmod +x /app/run.sh"
    assert (await graded("t", write)).reward == 0.0


IN_PROCESS = [
    "import not_there",
    "def answer():\n    import not_there",
    "exec('import not_there')",
    "import subprocess\nsubprocess.run(['not-there'])",
    "def answer():\n    import subprocess\n    subprocess.run(['not-there'])",
    "import pytest\npytest.exit('x', returncode=4)",
    "def answer():\n    import pytest\n    pytest.exit('x', returncode=5)",
]
CALLS = "import solution\n\n\ndef test_it():\n    assert solution.answer() == 42\n"


@pytest.mark.parametrize("solution", IN_PROCESS)
@pytest.mark.parametrize(
    "test_sh",
    [
        "PYTHONPATH=/app pytest /tests/test_outputs.py\n",
        "cp /tests/test_outputs.py /tmp; cd /app; python3 -m pytest /tmp/test_outputs.py\n",
        "PYTHONPATH=/app python3 -c 'import solution; assert solution.answer() == 42'\n",
        "PYTHONPATH=/app python3 - <<'EOF'\nimport solution\nassert solution.answer() == 42\nEOF\n",
    ],
    ids=["pytest", "copied", "command line", "standard input"],
)
async def test_what_code_of_the_agent_misses_in_the_tests_process_is_worth_zero(
    tasks_directory: Path, test_sh: str, solution: str
) -> None:
    script(tasks_directory, test_sh, CALLS, "Write /app/solution.py.\n")
    assert (await graded("t", f"cat > solution.py <<'EOT'\n{solution}\nEOT")).reward == 0.0


PACKAGES = "/usr/local/lib/python3/dist-packages"


@pytest.mark.parametrize(
    ("dockerfile", "solution"),
    [
        ("WORKDIR /usr/src/app\n", "/usr/src/app/solution.py"),
        (f"WORKDIR /app\nRUN ln -s /app/mine.py {PACKAGES}/solution.py\n", "/app/mine.py"),
        (f"WORKDIR /app\nRUN ln -s /app/mine {PACKAGES}/solution\n", "/app/mine/__init__.py"),
        (f"COPY x.py {PACKAGES}/solution.py\nRUN chmod 666 {PACKAGES}/solution.py\n", f"{PACKAGES}/solution.py"),
    ],
    ids=["work directory", "link", "link to a directory", "writable file"],
)
async def test_code_of_the_agent_below_usr_is_not_the_systems(
    tasks_directory: Path, dockerfile: str, solution: str
) -> None:
    script(tasks_directory, f"PYTHONPATH=/usr/src/app:{PACKAGES} pytest /tests\n", CALLS)
    environment = tasks_directory / "t" / "environment"
    (environment / "Dockerfile").write_text(f"FROM x\n{dockerfile}")
    (environment / "x.py").write_text("")
    write = f"mkdir -p $(dirname {solution}); printf 'def answer():\\n    %s\\n' '{{}}' > {solution}"
    assert (await graded("t", write.format("import not_there"))).reward == 0.0
    assert (await graded("t", write.format("return 42"))).reward == 1.0


async def test_a_package_of_the_task_below_usr_is_the_systems(tasks_directory: Path) -> None:
    script(tasks_directory, f"[ -e out.txt ] && PYTHONPATH={PACKAGES} pytest /tests\n", CALLS)
    environment = tasks_directory / "t" / "environment"
    (environment / "Dockerfile").write_text(f"FROM x\nWORKDIR /app\nCOPY x.py {PACKAGES}/solution.py\n")
    (environment / "x.py").write_text("import not_there\n")
    with pytest.raises(EnvironmentFailed, match="not_there"):
        await graded("t", RIGHT)


@pytest.mark.parametrize(
    ("test_sh", "command"),
    [
        ("pytest -c my.ini /tests\n", "printf '[pytest]\\naddopts = --no-such-option\\n' > my.ini"),
        ("pytest -c my.ini /tests\n", "printf '[pytest]\\npython_functions = x*\\n' > my.ini"),
        ("pytest -c my.ini /tests\n", "echo '[' > my.ini"),
        ("pytest /app/test_mine.py\n", "echo 'import not_there' > test_mine.py"),
        ("pytest /app/test_mine.py\n", "echo 'def test_it(no_such_fixture): pass' > test_mine.py"),
    ],
)
async def test_the_agents_own_tests_and_settings_are_worth_zero(
    tasks_directory: Path, test_sh: str, command: str
) -> None:
    script(tasks_directory, test_sh)
    dockerfile = "FROM x\nWORKDIR /app\nRUN touch my.ini\n"
    (tasks_directory / "t" / "environment" / "Dockerfile").write_text(dockerfile)
    assert (await graded("t", command)).reward == 0.0


@pytest.mark.parametrize("solution", ["import not_there", "1 / 0", "import pytest\npytest.exit('x', returncode=4)"])
async def test_a_conftest_that_code_of_the_agent_breaks_is_worth_zero(tasks_directory: Path, solution: str) -> None:
    script(tasks_directory, "PYTHONPATH=/app pytest /tests\n", instruction="Repair /app/solution.py.\n")
    root = tasks_directory / "t"
    (root / "tests" / "conftest.py").write_text("import solution\n")
    (root / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /app\nCOPY solution.py /app/\n")
    (root / "environment" / "solution.py").write_text("")
    assert (await graded("t", f"cat > solution.py <<'EOT'\n{solution}\nEOT")).reward == 0.0


async def test_a_fixture_that_the_agent_takes_away_is_worth_zero(tasks_directory: Path) -> None:
    script(tasks_directory, "cp /tests/*.py . && pytest test_outputs.py\n", OUTPUTS.replace("()", "(of_tests)", 1))
    fixture = "import pytest\n\n\n@pytest.fixture\ndef of_tests():\n    return 1\n"
    (tasks_directory / "t" / "tests" / "conftest.py").write_text(fixture)
    assert (await graded("t", RIGHT)).reward == 1.0
    assert (await graded("t", "printf '[pytest]\\naddopts = --noconftest\\n' > pytest.ini")).reward == 0.0


async def test_a_fixture_that_the_agent_deletes_from_the_project_is_worth_zero(tasks_directory: Path) -> None:
    test_sh = "cp /tests/test_outputs.py . && pytest test_outputs.py\n"
    script(tasks_directory, test_sh, OUTPUTS.replace("()", "(of_project)", 1))
    environment = tasks_directory / "t" / "environment"
    (environment / "Dockerfile").write_text("FROM x\nWORKDIR /app\nCOPY conftest.py /app/\n")
    fixture = "import pytest\n\n\n@pytest.fixture\ndef of_project():\n    return 1\n"
    (environment / "conftest.py").write_text(fixture)
    assert (await graded("t", RIGHT)).reward == 1.0
    assert (await graded("t", "rm conftest.py")).reward == 0.0


@pytest.mark.parametrize(
    "test_sh", ["cp /tests/*.py . && pytest test_outputs.py\n", "[ -e out.txt ] && pytest /tests\n"]
)
async def test_a_fixture_that_the_machine_lacks_is_an_error(tasks_directory: Path, test_sh: str) -> None:
    script(tasks_directory, test_sh, OUTPUTS.replace("()", "(mocker)", 1))
    with pytest.raises(EnvironmentFailed, match="mocker"):
        await graded("t", RIGHT)


async def test_a_conftest_that_misses_a_module_is_an_error(tasks_directory: Path) -> None:
    script(tasks_directory, "[ -e out.txt ] && pytest /tests\n")
    (tasks_directory / "t" / "tests" / "conftest.py").write_text("import numpy\n")
    with pytest.raises(EnvironmentFailed, match="numpy"):
        await graded("t", RIGHT)


async def test_directories_of_the_agent_on_path_do_not_stand_before_the_tools(tasks_directory: Path) -> None:
    script(tasks_directory, "python3 -m pytest /tests/test_outputs.py\n")
    (tasks_directory / "t" / "environment" / "Dockerfile").write_text(
        "FROM x\nWORKDIR /app\nENV PATH=/app/bin:$PATH PYTHONPATH=/app/lib\n"
    )
    evil = "mkdir -p bin lib; for n in python3 pytest jq bash; do printf '#!/bin/sh\\nexit 0\\n' > bin/$n; done; "
    evil += "chmod +x bin/*; echo 'import os; os._exit(0)' > lib/pytest.py; cp lib/pytest.py lib/sitecustomize.py"
    assert (await graded("t", evil)).reward == 0.0


@pytest.mark.parametrize("module", ["argparse", "unittest"])
async def test_a_work_directory_below_usr_does_not_stand_before_the_systems_modules(
    tasks_directory: Path, module: str
) -> None:
    script(tasks_directory, "PYTHONPATH=/usr/src/app python3 -m unittest discover -s /tests -p 'unit*.py'\n")
    unit = "import unittest\n\n\nclass It(unittest.TestCase):\n    def test_it(self):\n        open('out.txt')\n"
    (tasks_directory / "t" / "tests" / "unit_it.py").write_text(unit)
    (tasks_directory / "t" / "environment" / "Dockerfile").write_text("FROM x\nWORKDIR /usr/src/app\n")
    assert (await graded("t", "touch out.txt")).reward == 1.0
    assert (await graded("t", f"echo 'import os; os._exit(0)' > {module}.py")).reward == 0.0


def judged(directory: Path, command: str) -> None:
    """Write a task ``p`` whose only probe runs ``command`` and must print 42."""
    harbor_style.write_task(
        directory / "p",
        {
            "task.toml": f'[[errata.probes]]\nname = "answer"\ncommand = "{command}"\n',
            "environment/Dockerfile": "FROM x\nWORKDIR /app\nCOPY --chmod=755 total /app/total\n"
            "RUN ln -s /app/total /usr/local/bin/total\n",
            "environment/total": "#!/bin/sh\necho 41\n",
            "tests/verify.py": "from errata_verify import check, probe\n\n\n@check()\ndef it_prints_42():\n"
            "    assert probe('answer')['stdout'] == '42\\n'\n",
        },
    )


def claiming(what: str) -> str:
    """Return a command that makes ``total`` print what bash prints where it does not find a program."""
    return f"printf '#!/bin/sh\\necho /bin/bash: line 1: {what} >&2\\nexit 127\\n' > total"


@pytest.mark.parametrize(
    ("probe", "command"),
    [
        ("exec total", claiming("exec: total: not found")),
        ("exec total", "rm total"),
        ("exec total blue", claiming("blue: command not found")),
        ("exec total 'red|blue'", claiming("blue: command not found")),
    ],
    ids=["claimed of its command", "its command deleted", "claimed of an argument", "claimed of quoted text"],
)
async def test_a_probed_program_cannot_turn_a_zero_into_an_error(
    tasks_directory: Path, probe: str, command: str
) -> None:
    judged(tasks_directory, probe)
    assert (await graded("p", command)).reward == 0.0


async def test_a_probe_that_misses_a_tool_is_an_error_also_where_the_start_does_not_get_that_far(
    tasks_directory: Path,
) -> None:
    judged(tasks_directory, "[ $(total) = 42 ] && A=1 frobnicate-verify")
    assert (await graded("p", "true")).reward == 0.0
    with pytest.raises(EnvironmentFailed, match="frobnicate-verify"):
        await graded("p", "printf '#!/bin/sh\\necho 42\\n' > total")
