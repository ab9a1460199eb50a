"""The detectors where commands ran on the server's own machine: what is the agent's, and what a marker may name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from errata_protocol.detect import detect
from errata_protocol.detect.agent_files import AgentFiles
from errata_protocol.detect.interpreted import is_python
from errata_protocol.markers import Detection

OUTPUTS = Path(__file__).parent / "data" / "unsandboxed.jsonl"
ROWS = [json.loads(line) for line in OUTPUTS.read_text(encoding="utf-8").splitlines()]


def is_host_file(path: str) -> bool:
    return path.startswith("/srv/")


def find(command: str, stderr: str, exit_code: int = 1) -> Detection:
    return detect(command, exit_code, "", stderr, is_host_file=is_host_file)


def traceback(*frames: tuple[str, int, str], error: str = "ZeroDivisionError: division by zero") -> str:
    lines = [f'  File "{file}", line {line}, in {function}\n' for file, line, function in frames]
    return f"Traceback (most recent call last):\n{''.join(lines)}{error}\n"


def code(action: str, found: Detection) -> str | None:
    site = found.error_site
    return action[slice(*site.action_span)] if site is not None and site.action_span else None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row["id"]))
def test_no_marker_of_a_recorded_output_names_a_path_of_the_server(row: dict[str, object]) -> None:
    found = detect(row["command"], row["exit_code"], row["stdout"], row["stderr"], is_host_file=is_host_file)  # type: ignore[arg-type]
    for site in found.error_sites:
        told = site.model_dump_json()
        assert "/srv/" not in told or "/srv/" in str(row["command"])
        assert site.file is None or not site.file.startswith("/")


def test_without_the_predicate_a_frame_of_the_server_would_be_the_site() -> None:
    printed = traceback(("/srv/env/server/executor.py", 84, "run"))
    sandboxed, here = detect("1/0", 1, "", printed), find("1/0", printed)
    assert sandboxed.error_site is not None and sandboxed.error_site.file == "/srv/env/server/executor.py"
    assert here.error_kind == "runtime_error"
    assert here.error_site is not None and here.error_site.file is None and here.error_site.action_span is None


def test_an_unknown_file_that_the_action_does_not_name_is_no_site() -> None:
    worker = traceback(("/app/worker/main.py", 7, "serve"), ("/app/worker/check.py", 31, "refuse"))
    found = find("print(1)", worker)
    assert found.error_site is not None and found.error_site.file is None


def test_a_file_beside_one_that_the_action_runs_is_the_agents_and_named_as_it_would_name_it() -> None:
    printed = traceback(("/var/lib/jobs/7f/main.py", 3, "<module>"), ("/var/lib/jobs/7f/shop/cart.py", 12, "total"))
    site = find("python main.py", printed).error_site
    assert site is not None and (site.file, site.line) == ("shop/cart.py", 12)


def test_a_name_of_the_server_that_the_action_happens_to_use_stays_the_servers() -> None:
    printed = traceback(("/srv/env/models.py", 3, "<module>"))
    site = find("open('models.py').read()", printed).error_site
    assert site is not None and site.file is None


def test_a_function_of_an_earlier_action_gives_way_to_the_line_that_calls_it() -> None:
    action = "y = 2\nz = f()\n"
    found = find(action, traceback(("<string>", 2, "<module>"), ("<string>", 1, "f")))
    assert code(action, found) == "z = f()"
    action = "def f():\n    return 1/0\nf()\n"
    found = find(action, traceback(("<string>", 3, "<module>"), ("<string>", 2, "f")))
    assert code(action, found) == "return 1/0"


def test_generated_code_of_the_server_is_not_the_action() -> None:
    action = "print(3)\nprint(4)\n"
    printed = traceback(("/srv/env/server.py", 9, "step"), ("<string>", 2, "__init__"), error="TypeError: no")
    assert code(action, find(action, printed)) is None


def test_a_statement_that_stands_twice_has_no_span() -> None:
    message = "InterpreterError: Code execution failed at line 'f(0)' due to: ZeroDivisionError: division by zero\n"
    printed = traceback(("/srv/env/run.py", 1, "run"), error=message)
    assert code("f(0)\ng(1)", find("f(0)\ng(1)", printed)) == "f(0)"
    assert code("f(0)\nf(0)", find("f(0)\nf(0)", printed)) is None


@pytest.mark.parametrize(
    "refusal",
    [
        "InterpreterError: Import of os is not allowed. Authorized imports are: ['re']",
        "SecurityError: import of 'os' is not permitted",
        "RuntimeError: Forbidden import: os",
        "ValueError: Importing os is blocked",
        "Exception: Module 'os' is not allowed",
        "ImportError: import os is disabled",
        "PermissionError: Unauthorized import of os",
    ],
)
def test_a_refused_import_is_an_import_error_at_the_module(refusal: str) -> None:
    found = find("import os", traceback(("/srv/env/run.py", 1, "run"), error=refusal))
    assert found.error_kind == "import_error"
    assert code("import os", found) == "os"


@pytest.mark.parametrize("action", ["test = 1/0", "diff = a - b", "which = undefined", "grep = {}['k']"])
def test_an_exception_is_no_answer_of_a_command_that_a_variable_is_named_after(action: str) -> None:
    found = find(action, traceback(("/srv/env/run.py", 1, "run"), error="KeyError: 'k'"))
    assert found.error_kind == "runtime_error"


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("1/0", True),
        ("x = 1", True),
        ("print('a\\d')", True),
        ("import os", True),
        ("d['k']", True),
        ("make", False),
        ("ls -la", False),
        ("ls -1", False),
        ("bin/run", False),
        ("cat f.txt", False),
        ("python -c 'x'", False),
        ("(" * 5000, False),
        ("\x00", False),
        ("", False),
    ],
)
def test_python_is_told_from_shell(text: str, python: bool) -> None:
    assert is_python(text) is python


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cannot open '/srv/env/key file.pem': no", "cannot open '.../key file.pem': no"),
        ("open /home/op/data/x.json failed", "open .../x.json failed"),
        ("at file:///home/op/a.js:3", "at .../a.js:3"),
        ("error:/home/op/x.py", "error:.../x.py"),
        ("/bin/sh: 1: nope: not found", "/bin/sh: 1: nope: not found"),
        ("cat: /workspace/a.txt: No such file", "cat: /workspace/a.txt: No such file"),
        ("cat: /data/mine.txt: No such file", "cat: /data/mine.txt: No such file"),
        ("see https://example.org/a/b for 1/2 or src/a.py", "see https://example.org/a/b for 1/2 or src/a.py"),
        ("3 /4", "3 /4"),
    ],
)
def test_paths_of_the_server_are_shortened_to_their_names(text: str, shown: str) -> None:
    assert AgentFiles("cat /data/mine.txt", [text], is_host_file).redacted(text) == shown
