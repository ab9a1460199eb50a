"""docker/entrypoint.sh: what a server would refuse is refused before the base tree is copied to the volume."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "docker" / "entrypoint.sh"
TREE = "/var/lib/errata/bases/default"


@pytest.fixture
def container(tmp_path: Path) -> Path:
    """A directory with the script, and programs that write down how they were called; ``bin/NAME.fails`` fails them."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bases" / "tree-1").mkdir(parents=True)
    (tmp_path / "bases" / "default").symlink_to("tree-1")
    text = SCRIPT.read_text()
    assert TREE in text
    (tmp_path / "entrypoint.sh").write_text(text.replace(TREE, str(tmp_path / "bases" / "default")))
    for name, more in (("errata", ""), ("unshare", ""), ("mount", ""), ("id", "echo 0")):
        program = tmp_path / "bin" / name
        fails = f'[ ! -e {tmp_path}/bin/{name}.fails ] || {{ echo "{name}: refused" >&2; exit 1; }}'
        program.write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n{fails}\n{more}\n')
        program.chmod(0o755)
    return tmp_path


def started(container: Path, *command: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    done = subprocess.run(
        ["sh", str(container / "entrypoint.sh"), *command],
        env={
            "PATH": f"{container}/bin:/usr/bin:/bin",
            "ERRATA_BASE_DIR": str(container / "volume"),
            "ERRATA_DATA_DIR": str(container / "data"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    calls = (container / "calls").read_text().splitlines()
    return done, [call for call in calls if call.startswith("errata")]


SERVE = ("errata", "serve", "terminal", "--host", "0.0.0.0")
COPY = "errata base import"


def test_a_server_is_checked_then_the_tree_is_copied_then_it_starts(container: Path) -> None:
    done, calls = started(container, *SERVE)
    assert done.returncode == 0
    assert [call.startswith(COPY) for call in calls] == [False, True, False]
    assert calls[0] == " ".join([*SERVE, "--check"]) and calls[2] == " ".join(SERVE)


def test_a_server_without_a_token_ends_before_the_copy(container: Path) -> None:
    (container / "bin" / "errata.fails").touch()
    done, calls = started(container, *SERVE)
    assert done.returncode == 1 and calls == [" ".join([*SERVE, "--check"])]
    assert done.stderr == "errata: refused\n"


def test_a_container_that_cannot_make_sandboxes_ends_before_the_copy_with_one_line(container: Path) -> None:
    (container / "bin" / "unshare.fails").touch()
    done, calls = started(container, *SERVE)
    assert done.returncode == 1 and not any(call.startswith(COPY) for call in calls)
    assert done.stderr.count("\n") == 1 and "docker compose up envs" in done.stderr


def test_a_volume_with_an_fsgroup_does_not_hand_its_bit_on(container: Path) -> None:
    for name, mode in (("volume", 0o755), ("data", 0o700)):
        (container / name).mkdir()
        (container / name).chmod(0o2000 | mode)
    done, _ = started(container, *SERVE)
    assert done.returncode == 0
    assert [(container / name).stat().st_mode & 0o7777 for name in ("volume", "data")] == [0o755, 0o700]


def test_a_data_directory_that_is_made_is_its_owners(container: Path) -> None:
    done, _ = started(container, *SERVE)
    assert done.returncode == 0 and (container / "data").stat().st_mode & 0o7777 == 0o700


def test_other_commands_are_not_checked(container: Path) -> None:
    done, calls = started(container, "errata", "doctor")
    assert done.returncode == 0 and [call.startswith(COPY) for call in calls] == [True, False]


def test_a_tree_that_is_there_is_not_copied_again(container: Path) -> None:
    (container / "volume" / "tree-1").mkdir(parents=True)
    assert started(container, *SERVE)[1] == [" ".join(SERVE)]
