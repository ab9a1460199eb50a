"""One bad task directory: it is refused by name, without waiting, and every other task stays usable."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed
from terminal_env.server import dockerfile, task_files
from terminal_env.server.dockerfile import DockerfileInvalid, Placed
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.tasks import BUNDLED, LOCAL, TASKS_VARIABLE, TaskInvalid, load_tasks, read_task, task_roots
from terminal_env.spec import SPEC

from ..counted_work import calls_of
from ..hostile_files import make_socket, make_sparse
from .scripted import write_task

Build = Callable[[Path], object]


def files(**named: str) -> Build:
    """Write further files of a task; ``__`` in a name stands for a slash, ``_`` for a dot."""
    return lambda root: write_task(root, {_named(name): content for name, content in named.items()})


def toml(text: str) -> Build:
    return lambda root: write_task(root, {"task.toml": text})


def docker(text: str, **also: str) -> Build:
    named = {_named(name): content for name, content in also.items()}
    return lambda root: write_task(root, {"environment/Dockerfile": text, "environment/a": "a\n", **named})


def compose(text: str) -> Build:
    return lambda root: write_task(root, {"environment/docker-compose.yaml": text})


def _named(name: str) -> str:
    return name.replace("__", "/").replace("_", ".")


def special(name: str, make: Callable[[Path], object]) -> Build:
    def build(root: Path) -> None:
        write_task(root, {})
        path = root / name
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(path)

    return build


def _deep(path: Path) -> None:
    path.mkdir()
    place = os.open(path, os.O_RDONLY)
    try:
        for _ in range(100):
            os.mkdir("d", dir_fd=place)
            below = os.open("d", os.O_RDONLY, dir_fd=place)
            os.close(place)
            place = below
    finally:
        os.close(place)


def merges(levels: int, each: int) -> str:
    """YAML whose merge keys make a mapping of ``each ** levels`` pairs, if it is made into values."""
    lines = ["x0: &x0 {a: 1}"]
    lines += [f"x{n}: &x{n} {{<<: [{', '.join([f'*x{n - 1}'] * each)}]}}" for n in range(1, levels)]
    return "\n".join([*lines, f"services: {{main: {{}}, <<: *x{levels - 1}}}", ""])


DOUBLING = "FROM a\nENV A=aaaaaaaaaaaaaaaa\n" + "ENV A=$A$A$A$A$A$A$A$A\n" * 40

HOSTILE: dict[str, tuple[Build, str]] = {
    "fifo": (special("environment/pipe", os.mkfifo), "environment/pipe is a FIFO"),
    "fifo in tests": (special("tests/pipe", os.mkfifo), "tests/pipe is a FIFO"),
    "fifo for task.toml": (special("task.toml", os.mkfifo), "task.toml is a FIFO"),
    "fifo for the instruction": (special("instruction.md", os.mkfifo), "instruction.md is a FIFO"),
    "fifo for setup.sh": (special("setup.sh", os.mkfifo), "setup.sh is a FIFO"),
    "fifo for the Dockerfile": (special("environment/Dockerfile", os.mkfifo), "environment/Dockerfile is a FIFO"),
    "fifo for the compose file": (special("environment/docker-compose.yml", os.mkfifo), "is a FIFO"),
    "fifo for .dockerignore": (special("environment/.dockerignore", os.mkfifo), "is a FIFO"),
    "socket": (special("environment/s", make_socket), "environment/s is a socket"),
    "linked instruction": (special("instruction.md", lambda p: p.symlink_to("/etc/passwd")), "symbolic link"),
    "linked task.toml": (special("task.toml", lambda p: p.symlink_to("/etc/passwd")), "symbolic link"),
    "linked environment": (special("environment", lambda p: p.symlink_to("/etc")), "symbolic link"),
    "linked Dockerfile": (special("environment/Dockerfile", lambda p: p.symlink_to("/etc/passwd")), "symbolic link"),
    "link of tests to the host": (special("tests/data", lambda p: p.symlink_to("/etc/passwd")), "no file of the task"),
    "link of tests to itself": (special("tests/a", lambda p: p.symlink_to("a")), "leads nowhere"),
    "link of tests round in circles": (special("tests/a", lambda p: p.symlink_to(".")), "no file of the task"),
    "sparse": (special("environment/huge", make_sparse), "more than 536,870,912 bytes"),
    "sparse instruction": (special("instruction.md", make_sparse), "bytes"),
    "deep directories": (special("environment", _deep), "deeper than 64 directories"),
    "not utf-8": (special("instruction.md", lambda p: p.write_bytes(b"\xff\xfe")), "not UTF-8"),
    "toml not utf-8": (special("task.toml", lambda p: p.write_bytes(b"\xff\xfe")), "not UTF-8"),
    "large toml": (toml("a = '" + "x" * 300_000 + "'\n"), "larger than 262,144 bytes"),
    "deep toml": (toml("a = " + "[" * 100_000), "nested too deeply"),
    "deep inline toml": (toml("a = " + "{a = " * 20_000), "nested too deeply"),
    "dotted toml": (toml("a." * 100_000 + "a = 1\n"), "more than 32 parts"),
    "dotted toml in quotes": (toml("\"a\".'b' . " * 20_000 + "a = 1\n"), "more than 32 parts"),
    "time limit nan": (toml("[verifier]\ntimeout_sec = nan\n"), "finite number of seconds above 0, not nan"),
    "time limit inf": (toml("[verifier]\ntimeout_sec = inf\n"), "finite number"),
    "time limit text nan": (toml("[verifier]\ntimeout_sec = 'nan'\n"), "finite number"),
    "time limit negative": (toml("[verifier]\ntimeout_sec = -5\n"), "above 0, not -5"),
    "time limit zero": (toml("[verifier]\ntimeout_sec = 0\n"), "above 0, not 0"),
    "time limit huge": (toml("[verifier]\ntimeout_sec = 1" + "0" * 400 + "\n"), "number of seconds"),
    "time limit true": (toml("[verifier]\ntimeout_sec = true\n"), "number of seconds"),
    "time limit list": (toml("[verifier]\ntimeout_sec = []\n"), "number of seconds"),
    "tags": (toml("[metadata]\ntags = 5\n"), "tags must be a list"),
    "tags of tables": (toml("[metadata]\ntags = [{a = 1}]\n"), "tags must be a list"),
    "difficulty": (toml("[metadata]\ndifficulty = [1]\n"), "difficulty must be text"),
    "metadata": (toml("metadata = 5\n"), r"\[metadata\] must be a table"),
    "probe name": (toml("[[errata.probes]]\nname = [1]\ncommand = 'x'\n"), "name must be text"),
    "probe command": (toml("[[errata.probes]]\nname = 'a'\ncommand = 5\n"), "command must be text"),
    "probe nan": (toml("[[errata.probes]]\nname = 'a'\ncommand = 'x'\ntimeout_s = nan\n"), "finite"),
    "probe negative": (toml("[[errata.probes]]\nname = 'a'\ncommand = 'x'\ntimeout_s = -400\n"), "above 0"),
    "probes": (toml("[errata]\nprobes = 5\n"), "list of tables"),
    "probes of texts": (toml("[errata]\nprobes = ['a']\n"), "list of tables"),
    "env": (toml("[errata.env]\nA = [1]\n"), "must be text or a number"),
    "env with NUL": (toml('[errata.env]\nA = "\\u0000"\n'), "NUL"),
    "env name": (toml('[errata.env]\n"A; rm -r /" = "x"\n'), "not the name of a variable"),
    "flag": (toml("[errata]\ndeterministic = 'no'\n"), "true or false"),
    "base": (toml("[errata]\nbase = 5\n"), "base must be text"),
    "image": (toml("[environment]\ndocker_image = ['x']\n"), "docker_image must be text"),
    "services": (compose("services:\n  1: {}\n  a: {}\n"), "services 1, a"),
    "services of a list": (compose("services: [a]\n"), "no mapping `services`"),
    "services keyed by a list": (compose("services: {[a]: 1}\n"), "key has to be text"),
    "no services": (compose("- a\n"), "no mapping `services`"),
    "empty compose": (compose(""), "no mapping `services`"),
    "deep yaml": (compose("a: " + "[" * 50_000), "nested deeper than 64 levels"),
    "deep yaml by indentation": (compose("".join(" " * n + "a:\n" for n in range(200))), "deeper than 64 levels"),
    "aliases": (compose("a: &a [*a]\nservices: *a\n"), "no mapping `services`"),
    "merge keys": (compose(merges(12, 20)), "services a, main"),
    "yaml tags": (compose("services: !!python/object/apply:os.system ['true']\n"), "no mapping `services`"),
    "broken yaml": (compose("services: {\n"), "docker-compose.yaml"),
    "doubling": (docker(DOUBLING), "line 7: ENV A=.*longer than 65,536 characters"),
    "doubling arguments": (docker(DOUBLING.replace("ENV", "ARG")), "longer than 65,536 characters"),
    "doubling in a path": (
        docker(DOUBLING[:100] + "\nENV B=$A$A$A$A$A$A$A\nCOPY a /$B$B$B$B$B$B$B$B$B$B$B/\n"),
        "line ",
    ),
    "instructions": (docker("FROM a\n" + "ENV A=1\n" * 2000), "more than 1000 instructions"),
    "variables": (docker("FROM a\nENV " + " ".join(f"A{n}=1" for n in range(5000)) + "\n"), "1000 variables"),
    "deep path": (docker("FROM a\nWORKDIR " + "/a" * 100_000 + "\n"), "more than 128 parts"),
    "copies": (docker("FROM a\nCOPY " + "a " * 30_000 + "x/\n"), "more than 20,000 files|take too long"),
    "ignore patterns": (docker("FROM a\nCOPY a .\n", environment___dockerignore="x\n" * 500), "more than 200 patterns"),
    "copy of a fifo": (special("environment/Dockerfile", os.mkfifo), "FIFO"),
    "no directory": (special("tests", lambda p: None), "neither tests/verify.py nor tests/test.sh"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.rglob("*"):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


def built(root: Path, build: Build) -> Path:
    if build is HOSTILE["no directory"][0]:
        write_task(root, {})
        (root / "tests" / "verify.py").unlink()
        return root
    if build is HOSTILE["linked environment"][0]:
        write_task(root, {})
    build(root)
    return root


@pytest.mark.parametrize("what", HOSTILE)
def test_a_bad_directory_is_refused_by_name_and_the_others_are_served(what: str, directory: Path) -> None:
    build, words = HOSTILE[what]
    root = built(directory / "bad", build)
    with pytest.raises(TaskInvalid, match=f"^task bad: .*(?:{words})") as caught:
        read_task(root)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 5000
    write_task(directory / "good", {})
    found = load_tasks([directory])
    assert [task.id for task in found.splits[LOCAL]] == ["good"] and found.splits[BUNDLED]
    assert found.broken == {"bad": str(caught.value)}


@pytest.mark.parametrize("error", [RecursionError("deep"), MemoryError(), KeyError("x"), AttributeError("\x1b[2J")])
def test_an_exception_that_nobody_expected_is_contained_to_its_directory(
    error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(directory / "bad", {"environment/Dockerfile": "FROM a\n"})
    write_task(directory / "good", {})

    def broken(context: Path) -> None:
        raise error

    monkeypatch.setattr("terminal_env.server.tasks.read", broken)
    found = load_tasks([directory])
    assert [task.id for task in found.splits[LOCAL]] == ["good"]
    assert found.broken["bad"].startswith(f"task bad cannot be read ({type(error).__name__}")
    assert found.broken["bad"].isprintable()


async def test_a_reset_to_another_task_works_beside_a_bad_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch, environment: TerminalEnvironment
) -> None:
    built(directory / "bad", HOSTILE["deep toml"][0])
    monkeypatch.setenv(TASKS_VARIABLE, str(directory))
    started = await environment.reset_async(task_id=load_tasks().ids[0])
    assert started.instruction
    with pytest.raises(EnvironmentFailed, match=r"task bad: task\.toml"):
        await environment.reset_async(task_id="bad")


def test_what_cannot_be_used_is_told_without_a_path_of_this_machine(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fifo", "linked instruction", "sparse instruction", "copy of a fifo"):
        built(directory / name.replace(" ", "-"), HOSTILE[name][0])
    monkeypatch.setenv(TASKS_VARIABLE, str(directory))
    told = SPEC.unusable.partition(":")
    found = getattr(importlib.import_module(told[0]), told[2])()
    assert set(found) == {"fifo", "linked-instruction", "sparse-instruction", "copy-of-a-fifo"}
    assert not [why for why in found.values() if str(directory) in why]


def test_a_name_that_cannot_be_printed_is_refused_and_printed_as_escapes(directory: Path) -> None:
    for name in (b"\x1b]0;x\x07", b"\xff", "\u202ename".encode()):
        write_task(Path(os.fsdecode(os.fsencode(directory) + b"/" + name)), {})
    found = load_tasks([directory])
    assert LOCAL not in found.splits
    assert sorted(found.broken) == ["\\u202ename", "\\udcff", "\\x1b]0;x\\x07"]
    assert all(why.isprintable() for why in found.broken.values())


def test_a_directory_that_cannot_be_searched_hides_no_other(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_task(directory / "good", {})
    (directory / "closed").mkdir()
    listed = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    broken: dict[str, str] = {}
    assert [root.name for root in task_roots(directory, broken)] == ["good"]
    assert "Permission denied" in broken["closed"]
    assert "Permission denied" in load_tasks([directory]).broken["closed"]


def test_a_home_that_is_not_there_breaks_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TASKS_VARIABLE, "~no-such-user-here/tasks")
    from terminal_env.server.tasks import offered_tasks

    assert offered_tasks().splits[BUNDLED]


def test_a_file_that_became_a_fifo_is_refused_when_it_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="FIFO") as caught:
        task_files.read_text(tmp_path / "pipe")
    assert isinstance(caught.value, TaskInvalid)
    with pytest.raises(Exception, match="FIFO"):
        Placed("/workspace/pipe", tmp_path / "pipe", 0o644).entry()


def test_copy_refuses_a_fifo_of_the_build_context(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "Dockerfile").write_text("FROM a\nCOPY pipe /x\n")
    with pytest.raises(DockerfileInvalid, match="pipe is a FIFO"):
        dockerfile.read(tmp_path)


def test_patterns_of_many_stars_take_work_in_proportion_to_path_and_pattern() -> None:
    parts = ("a",) * 60
    pattern = dockerfile._compiled("/".join(["**", "a"] * 25 + ["b"]))
    assert calls_of(lambda: dockerfile._match_parts(parts, pattern), at_most=50_000) < 50_000
    assert not dockerfile._match_parts(parts, pattern)
    assert dockerfile._match_parts(("a", "b", "c"), dockerfile._compiled("a/**/c"))
    assert dockerfile._match_parts(("a",), dockerfile._compiled("**/a"))
    assert dockerfile._match_parts(("a",), dockerfile._compiled("a/**"))
    assert not dockerfile._match_parts(("a", "b"), dockerfile._compiled("*"))


def test_copy_and_ignore_do_no_more_work_than_their_bound(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"f{number}").write_text("")
    (tmp_path / ".dockerignore").write_text("".join(f"*x*y*{n}\n" for n in range(200)))
    (tmp_path / "Dockerfile").write_text("FROM a\n" + "".join(f"COPY f* z?{n}* d{n}/\n" for n in range(900)))
    with pytest.raises(DockerfileInvalid, match=r"take too long|is not in environment|more than 20,000"):
        dockerfile.read(tmp_path)
