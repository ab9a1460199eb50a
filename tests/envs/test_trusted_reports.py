"""Which processes' reports the runner of ``test.sh`` counts, by their command lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from terminal_env.server.runtime import script

SHELL = [
    (["bash"], True),
    (["bash", "-"], True),
    (["bash", "-e"], True),
    (["bash", "-c", "uvx pytest"], True),
    (["bash", "-ec", "uvx pytest"], True),
    (["bash", "-lc", "uvx pytest"], True),
    (["bash", "-c", "-e", "uvx pytest"], True),
    (["bash", "-euo", "pipefail", "-c", "uvx pytest"], True),
    (["bash", "-euoc", "pipefail", "uvx pytest"], True),
    (["bash", "--norc", "-O", "extglob", "-c", "uvx pytest"], True),
    (["sh", "-s", "--", "-y"], True),
    (["bash", "/tests/run.sh", "/app"], True),
    (["bash", "-euo", "pipefail", "/tests/run.sh"], True),
    (["bash", "-eo", "pipefail", "+x", "--", "/verifier/bin/uvx"], True),
    (["bash", "--rcfile", "/app/rc", "-x", "/tests/./run.sh"], True),
    (["dash", "-e", "-o", "nounset", "/logs/verifier/x.sh"], True),
    (["bash", "/app/run.sh"], False),
    (["bash", "run.sh"], False),
    (["bash", "-e", "/app/run.sh"], False),
    (["bash", "-euo", "pipefail", "/app/run.sh"], False),
    (["bash", "-o", "/tests/x", "/app/run.sh"], False),
    (["bash", "--rcfile", "/tests/rc", "/app/run.sh"], False),
    (["bash", "--init-file", "-c", "/app/run.sh"], False),
    (["bash", "--", "/app/run.sh", "-c"], False),
    (["bash", "-", "/app/run.sh", "-c"], False),
    (["bash", "--", "-c", "/tests/run.sh"], False),
    (["bash", "/app/run.sh", "-c", "/tests/run.sh"], False),
    (["bash", "/tests/../app/evil.sh"], False),
    (["bash", "/tests/a/../../app/evil.sh"], False),
    (["bash", "//tests//../app/evil.sh"], False),
    (["bash", "/testsuite/run.sh"], False),
    (["perl", "/tests/run.pl"], False),
]
PYTHON = [
    (["python3"], True),
    (["python3", "-"], True),
    (["python3", "-I", "-S", "-"], True),
    (["python3", "-c", "import x"], True),
    (["python3", "-cimport x"], True),
    (["python3", "-Ic", "import x"], True),
    (["python3", "-W", "ignore", "/tests/a.py"], True),
    (["python3", "-Wignore", "-uXdev", "/tests/a.py"], True),
    (["python3", "-IX", "dev", "-B", "/tests/a.py"], True),
    (["python3", "--check-hash-based-pycs", "never", "/tests/a.py"], True),
    (["python3.12", "-OO", "/verifier/programs/run_pytest.py"], True),
    (["python3", "/app/a.py"], False),
    (["python3", "a.py"], False),
    (["python3", "-W", "/tests/a.py", "/app/a.py"], False),
    (["python3", "-X", "/tests/a.py", "/app/a.py"], False),
    (["python3", "-Xc", "/app/a.py"], False),
    (["python3", "--check-hash-based-pycs", "-c", "/app/a.py"], False),
    (["python3", "-m", "pytest", "/tests"], False),
    (["python3", "-mpytest", "/tests"], False),
    (["python3", "-Im", "pytest", "/tests"], False),
    (["python3", "-m", "/tests/a"], False),
    (["python3", "--", "/app/a.py"], False),
    (["python3", "/tests/../app/a.py"], False),
    (["python3", "-u", "/app/a.py", "-c"], False),
]


@pytest.mark.parametrize(("words", "trusted"), SHELL + PYTHON)
def test_a_command_line_counts_by_what_it_runs(words: list[str], trusted: bool) -> None:
    assert script.trusted(words[0], words) is trusted


def test_a_wrapper_counts_with_any_arguments() -> None:
    assert script.trusted("timeout", ["timeout", "60", "/app/run.sh"])


def test_a_file_counts_by_where_it_really_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in ("tests", "logs", "tmp/verifier-1"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "tests/link.sh").symlink_to("../app/run.sh")
    (tmp_path / "logs/verifier").symlink_to("../tmp/verifier-1")
    monkeypatch.setattr(script, "OURS", (f"{tmp_path}/tests/", f"{tmp_path}/logs/"))
    monkeypatch.setattr(script, "LOGS", f"{tmp_path}/logs/verifier")
    places = ("tests/run.sh", "logs/verifier/made.sh", "tests/link.sh", "logs/verifier/../run.sh", "tmp/run.sh")
    counts = [script.trusted("bash", ["bash", f"{tmp_path}/{place}"]) for place in places]
    assert counts == [True, True, False, False, False]
