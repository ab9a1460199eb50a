"""Rootless mode: the same suites as root mode, run by a user who has no privilege at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_server.sandbox.base_trees.tree import find_base
from errata_server.sandbox.files.walk import remove_tree
from errata_server.sandbox.launcher import PROGRAMS
from errata_server.sandbox.namespace.backend import NamespaceBackend
from tests.hangs import HANGS_S

from .as_user import REPOSITORY, UID, as_user

pytestmark = [
    pytest.mark.rootless,
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's run of the suites is rootless already"),
]

CACHE = REPOSITORY / ".cache/rootless"
SUITES = [
    "tests/sandbox/test_conformance.py",
    "tests/sandbox/test_spec.py",
    "tests/sandbox/test_hostile.py",
    "tests/sandbox/test_abuse.py",
    "tests/sandbox/test_diskwatch.py::test_files_without_a_name_count[open]",
    "tests/sandbox/test_diskwatch.py::test_neither_memory_nor_a_deleted_file_of_a_frozen_layer_counts",
    "tests/sandbox/test_held_files.py",
    "tests/sandbox/test_diskwatch.py::test_a_fast_writer_is_stopped_near_its_limit",
    "tests/sandbox/test_flatten.py::test_a_squash_shows_no_ghost_of_a_deleted_file",
    "tests/sandbox/test_flatten.py::test_a_squash_keeps_what_hides_the_base",
    "tests/sandbox/test_namespace.py::test_host_paths_are_invisible",
    "tests/sandbox/test_namespace.py::test_after_a_mount_only_what_was_made_for_it_is_removed",
    "tests/sandbox/test_namespace.py::test_a_mount_on_or_below_a_writable_directory_is_seen_and_read_only",
    "tests/sandbox/test_namespace.py::test_packages_of_verifiers_are_seen_by_a_command_that_mounts_them_alone",
    "tests/sandbox/test_namespace.py::test_nothing_of_a_destroyed_sandbox_remains_but_named_layers",
    "tests/sandbox/test_namespace.py::test_after_close_no_process_cgroup_or_directory_is_left",
    "tests/sandbox/test_namespace.py::test_kill_9_of_the_owner_leaves_no_process_and_its_snapshots_go_on",
    "tests/sandbox/test_namespace.py::test_long_chains_are_flattened_and_every_state_stays",
    "tests/sandbox/test_namespace.py::test_a_killed_launcher_is_an_error_once_and_then_replaced",
    "tests/envs/test_terminal_recovery.py",
]
SLOW = "three_hundred or test_21 or three_thousand or test_07 or TestFake"
"""Left to root mode: what they are about (counting, draining) is the same code there."""


@pytest.fixture(scope="module")
def user_home() -> Iterator[Path]:
    """A home directory for the user. Not below pytest's, where only root may go."""
    place = Path(tempfile.mkdtemp(prefix="errata-rootless-"))
    place.chmod(0o755)
    yield place
    remove_tree(place)


@pytest.fixture(scope="module")
def base_dir(user_home: Path) -> Path:
    """A directory of bases that belongs to the user; kept between runs, because a copy of a tree takes a while."""
    source = find_base()
    place = CACHE / f"bases-{UID}"
    if not (place / source.id / "base.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        os.chown(place, UID, UID)
        arguments = ["-m", "errata_server.cli", "base", "import", str(source.root.parent)]
        made = as_user(arguments, user_home, base_dir=place)
        assert made.returncode == 0, made.stderr
        assert "files that only their owner may read are empty here" in made.stderr
    return place


def test_the_suites_of_root_mode_pass(user_home: Path, base_dir: Path) -> None:
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-rs", "-k", f"not ({SLOW})", *SUITES]
    result = as_user(arguments, user_home, base_dir=base_dir, timeout_s=HANGS_S, ERRATA_ONE_BACKEND="1")
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    # What does not apply says so: memory needs a cgroup, and that is all.
    skipped = [line for line in result.stdout.splitlines() if line.startswith("SKIPPED")]
    expected = (
        "memory_bytes is not held here",
        "a disk of its own takes root",
        "every file is the agent's; see test_rootless.py",
    )
    assert all(any(reason in line for reason in expected) for line in skipped), skipped
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed is not None and int(passed[1]) >= 75, result.stdout[-500:]


CHANGES = (
    "mkdir -p d/e; echo 1 > d/e/f; ln -s e d/l; mkfifo p; mkdir -m 000 closed; echo x > secret; chmod 000 secret",
    "rm ~/.bashrc; mkdir ~/.config; echo y > ~/.config/z; touch /tmp/t; chmod 700 /workspace",
    "rm -r d; mkdir d; touch d/new; chmod u+rwx closed; touch closed/in; chmod 500 closed",
)
PROGRAM = f"""
import asyncio, json, sys, tempfile
from pathlib import Path
from errata_server.sandbox.namespace.backend import NamespaceBackend

async def main():
    backend = NamespaceBackend(Path(tempfile.mkdtemp()) / "sandboxes")
    info = await backend.start()
    box = await backend.open()
    digests = []
    for command in {CHANGES!r}:
        result = await box.run(command)
        assert result.exit_code == 0, result
        digests += [await box.merged_digest(), (await box.snapshot()).ref.digest]
    look = await box.run("id; rm /etc/hostname; chmod 777 /etc; cat /etc/shadow; touch /x; mount; ls -l /proc/1/exe")
    await box.destroy()
    await backend.close()
    print(json.dumps([info.mode, sorted(info.enforces), info.notes, digests, look.stdout, look.stderr]))

asyncio.run(main())
"""


NOEXEC = """
import asyncio, sys
from pathlib import Path
from errata_environment.grading.staging import staged
from errata_server.sandbox.namespace.backend import NamespaceBackend

async def main(home, noexec):
    backend = NamespaceBackend(home / "noexec-sandboxes")
    await backend.start()
    box = await backend.open()
    mounts = {"/given": noexec, "/staged": staged(noexec)}
    print(await box.run("cat /given/program; /staged/program; /given/program; touch /given/x", mounts=mounts))
    await backend.close()

asyncio.run(main(*map(Path, sys.argv[1:])))
"""


def test_a_mount_from_where_no_program_runs_is_made_and_verifiers_are_staged_elsewhere(
    user_home: Path, base_dir: Path
) -> None:
    noexec = user_home / "noexec"
    noexec.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec,mode=777", "none", str(noexec)], check=True)
    try:
        program = noexec / "program"
        program.write_text("#!/bin/sh\necho ran\n", encoding="utf-8")
        program.chmod(0o755)
        arguments = ["-c", NOEXEC, str(user_home), str(noexec)]
        result = as_user(arguments, user_home, base_dir=base_dir, TMPDIR=str(noexec))
    finally:
        subprocess.run(["umount", "-l", str(noexec)], check=True)
    assert result.returncode == 0, result.stderr
    assert "#!/bin/sh\\necho ran\\nran\\n" in result.stdout
    assert "/given/program: Permission denied" in result.stdout and "Read-only file system" in result.stdout


async def test_the_same_changes_have_the_digests_of_root_mode(user_home: Path, base_dir: Path, data_dir: Path) -> None:
    result = as_user(["-c", PROGRAM], user_home, base_dir=base_dir)
    assert result.returncode == 0, result.stderr
    mode, enforces, notes, digests, out, err = json.loads(result.stdout)
    backend = NamespaceBackend(data_dir)
    assert (mode, (await backend.start()).mode) == ("rootless", "root")
    box = await backend.open()
    expected = []
    for command in CHANGES:
        await box.run(command)
        expected += [await box.merged_digest(), (await box.snapshot()).ref.digest]
    await backend.close()
    assert digests == expected
    assert "pids" in enforces and "memory_bytes" not in enforces
    assert any("memory is not limited" in note for note in notes)
    assert out.startswith("uid=64000(agent) gid=64000(agent)")
    assert "rm: cannot remove '/etc/hostname': Read-only file system" in err
    assert "chmod: changing permissions of '/etc': Read-only file system" in err
    assert "cat: /etc/shadow: Permission denied" in err
    assert "touch: cannot touch '/x': Read-only file system" in err


async def test_a_tree_of_root_is_refused_with_the_command_that_copies_it(user_home: Path) -> None:
    result = as_user(["-c", PROGRAM], user_home, base_dir=find_base().root.parents[1])
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert re.search(
        rf"belongs to uid 0, and the rootless sandbox needs one of uid {UID}: run `errata base import /", last
    )


def test_a_program_that_makes_a_system_tree_believes_to_be_root(user_home: Path, base_dir: Path) -> None:
    script = (
        "id -u; cd $HOME; touch f; chown 5:42 f && stat -c %u:%g f; mknod n c 1 3 && ls; mount -t proc p /proc; echo $$"
    )
    program = str(PROGRAMS / "fake_root.py")
    result = as_user(["-I", "-S", program, "/bin/sh", "-c", script], user_home, base_dir=base_dir)
    assert (result.returncode, result.stderr) == (0, "")
    first, owner, *names, pid = result.stdout.split()
    assert (first, owner, pid) == ("0", "0:0", "1") and "f" in names and "n" not in names
    assert (user_home / "f").stat().st_uid == UID
