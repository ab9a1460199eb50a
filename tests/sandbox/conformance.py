"""What every sandbox backend promises: one suite, run against each of them.

A backend's test class inherits `SandboxConformance` and gives it a started backend. Commands stay within what the fake
understands; what only real processes can show is in `test_hostile.py` and `test_namespace.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from errata_protocol.environment import Snapshot
from errata_protocol.errors import SandboxFailed
from errata_server.sandbox.base import Backend, Limits, PathRefused, SandboxSnapshot

COUNT = "n=$(cat n || true); echo $((n+1)) > n"


class SandboxConformance:
    """Promises of `errata_server.sandbox.base`. Subclasses provide the fixture ``backend``."""

    async def test_a_command_reports_output_and_exit_code(self, backend: Backend) -> None:
        box = await backend.open()
        result = await box.run("echo out; exit 3")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "out\n", "")
        assert (result.stdout_bytes, result.timed_out, result.limit_hit) == (4, False, None)

    async def test_a_new_sandbox_starts_in_an_empty_workspace(self, backend: Backend) -> None:
        box = await backend.open()
        assert (await box.run("pwd; ls")).stdout == "/workspace\n"

    async def test_files_and_shell_state_carry_over_to_the_next_command(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("mkdir d && cd d && export WORD=kept && echo text > f")
        assert (await box.run("pwd; echo $WORD; cat f")).stdout == "/workspace/d\nkept\ntext\n"

    async def test_a_failing_command_keeps_what_it_changed_before(self, backend: Backend) -> None:
        box = await backend.open()
        assert (await box.run("cd /tmp; export A=1; false; exit 5")).exit_code == 5
        assert (await box.run("pwd; echo $A")).stdout == "/tmp\n1\n"

    async def test_error_messages_are_those_of_a_plain_bash(self, backend: Backend) -> None:
        box = await backend.open()
        missing = await box.run("foo")
        assert (missing.exit_code, missing.stderr) == (127, "/bin/bash: line 1: foo: command not found\n")
        assert (await box.run("true\n\nbar")).stderr == "/bin/bash: line 3: bar: command not found\n"
        assert (await box.run("cat nope")).stderr == "cat: nope: No such file or directory\n"
        assert "line 1: cd: /nope: No such file or directory" in (await box.run("cd /nope")).stderr
        assert (await box.run("echo x > /no/f")).stderr == "/bin/bash: line 1: /no/f: No such file or directory\n"

    async def test_a_timeout_ends_the_command_and_keeps_the_former_shell_state(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("cd /tmp")
        result = await box.run("cd /; echo before; sleep 60", timeout_s=0.5)
        assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "before\n")
        assert (await box.run("pwd")).stdout == "/tmp\n"

    async def test_undecodable_bytes_and_nul_are_escaped(self, backend: Backend) -> None:
        box = await backend.open()
        assert (await box.run(r"printf '\xff\x00é'")).stdout == "\\xff\\x00é"

    async def test_output_beyond_the_bound_keeps_head_and_tail(self, backend: Backend) -> None:
        box = await backend.open(limits=Limits(keep_bytes=100))
        await box.write_file("long", b"H" * 1000 + "é".encode() * 500 + b"T" * 30)
        result = await box.run("cat long")
        assert result.truncated
        assert result.stdout_bytes == 2030
        assert result.stdout.startswith("H" * 50 + "\n[... ")
        assert result.stdout.endswith("é" * 10 + "T" * 30)

    async def test_standard_input_is_what_was_given_and_empty_otherwise(self, backend: Backend) -> None:
        box = await backend.open()
        assert (await box.run("cat", stdin=b"hello")).stdout == "hello"
        assert (await box.run("cat")).stdout == ""

    async def test_variables_for_one_command_do_not_stay(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("export KEPT=old")
        result = await box.run("echo $ONCE $KEPT; export OTHER=1", env={"ONCE": "a b'c", "KEPT": "new"})
        assert result.stdout == "a b'c new\n"
        assert (await box.run("echo [$ONCE] $KEPT $OTHER")).stdout == "[] old 1\n"

    async def test_a_clean_command_neither_reads_nor_writes_shell_state(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("cd /tmp; export A=1")
        assert (await box.run("pwd; echo [$A]; cd /etc; export A=2", clean=True)).stdout == "/\n[]\n"
        assert (await box.run("pwd; echo $A")).stdout == "/tmp\n1\n"

    async def test_a_mount_is_there_for_one_command_and_leaves_no_trace(self, backend: Backend, tmp_path: Path) -> None:
        source = tmp_path / "verifier"
        source.mkdir()
        (source / "test.sh").write_text("secret\n")
        box = await backend.open()
        before = await box.merged_digest()
        result = await box.run("cat /verifier/test.sh", clean=True, mounts={"/verifier": source})
        assert result.stdout == "secret\n"
        assert (await box.run("cat /verifier/test.sh")).exit_code == 1
        assert await box.merged_digest() == before

    async def test_files_are_read_and_written_as_the_shell_sees_them(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("mkdir d && cd d")
        await box.write_file("sub/dir/f", b"\x00\xffdata")
        assert await box.read_file("/workspace/d/sub/dir/f") == b"\x00\xffdata"
        assert await box.read_file("sub/dir/f", max_bytes=2) == b"\x00\xff"
        await box.write_file("sub/dir/f", b"short")
        assert (await box.run("cat sub/dir/f")).stdout == "short"

    @pytest.mark.parametrize(
        ("path", "reason"), [("nope", "ENOENT"), ("/tmp", "EISDIR"), ("", "ENOENT"), ("a\0b", "EINVAL")]
    )
    async def test_a_path_that_is_no_file_is_refused_in_words(self, backend: Backend, path: str, reason: str) -> None:
        box = await backend.open()
        with pytest.raises(PathRefused) as refused:
            await box.read_file(path)
        assert refused.value.reason == reason

    async def test_writing_below_a_file_or_over_a_directory_is_refused(self, backend: Backend) -> None:
        box = await backend.open(limits=Limits(file_size_bytes=1000))
        await box.write_file("f", b"x")
        for path, reason in (("f/below", "ENOTDIR"), ("/tmp", "EISDIR"), ("big", "EFBIG")):
            with pytest.raises(PathRefused) as refused:
                await box.write_file(path, b"y" * (2000 if path == "big" else 1))
            assert refused.value.reason == reason

    async def test_an_untouched_sandbox_is_named_by_its_base_tree(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("true")
        snapshot = await box.snapshot()
        assert snapshot.ref.kind == "base"
        assert (await (await backend.restore(snapshot)).run("pwd")).stdout == "/workspace\n"

    async def test_a_snapshot_without_changes_is_the_same_layer(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("echo 1 > f")
        first = await box.snapshot()
        await box.run("cat f; cd /tmp")
        second = await box.snapshot()
        assert first.ref == second.ref
        assert first.shell != second.shell
        await box.run("echo 2 > /workspace/f")
        assert (await box.snapshot()).ref != first.ref

    async def test_a_fork_equals_its_parent_and_neither_disturbs_the_other(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("mkdir d; cd d; export A=1; echo 1 > f")
        snapshot = await box.snapshot()
        child = await backend.restore(snapshot)
        assert await child.merged_digest() == await box.merged_digest()
        assert (await child.run("pwd; echo $A; cat f; echo child > f; rm -r /workspace/d")).exit_code == 0
        assert (await box.run("cat f; echo parent > f")).stdout == "1\n"
        assert (await (await backend.restore(snapshot)).run("cat f")).stdout == "1\n"

    async def test_every_snapshot_stays_what_it_was(self, backend: Backend) -> None:
        box = await backend.open()
        taken = []
        for _ in range(5):
            await box.run(COUNT)
            taken.append(await box.snapshot())
        for count, snapshot in enumerate(taken, 1):
            assert (await (await backend.restore(snapshot)).run("cat n")).stdout == f"{count}\n"

    async def test_two_roads_to_the_same_tree_give_the_same_merged_digest(self, backend: Backend) -> None:
        one, two = await backend.open(), await backend.open()
        await one.run("mkdir d; echo 1 > d/f; echo x > gone")
        await one.snapshot()
        await one.run("rm gone; rm -r d; mkdir d; echo 2 > d/f")
        await one.snapshot()
        await two.run("mkdir d; echo 2 > d/f")
        assert await one.merged_digest() == await two.merged_digest()
        await two.run("echo 3 > d/f")
        assert await one.merged_digest() != await two.merged_digest()

    async def test_caches_are_kept_but_do_not_count_in_a_digest(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("echo 1 > f")
        before, snapshot = await box.merged_digest(), await box.snapshot()
        await box.run("mkdir __pycache__; echo x > __pycache__/a.pyc; echo y > b.pyc")
        assert await box.merged_digest() == before
        later = await box.snapshot()
        assert later.ref != snapshot.ref
        assert (await (await backend.restore(later)).run("cat __pycache__/a.pyc b.pyc")).stdout == "x\ny\n"

    async def test_a_snapshot_fits_into_an_environments_state(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("export A=1")
        snapshot = await box.snapshot()
        assert Snapshot(snapshot.shell, (snapshot.ref,)).refs[0] == snapshot.ref
        assert len(snapshot.shell) <= 32 * 1024

    async def test_collect_deletes_what_nobody_names(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("echo 1 > f")
        first = await box.snapshot()
        await box.run("echo 2 > f")
        second = await box.snapshot()
        await box.destroy()
        assert (await backend.collect([second.ref])).layers == 0
        assert (await backend.collect([first.ref])).layers == 1
        assert (await (await backend.restore(first)).run("cat f")).stdout == "1\n"
        with pytest.raises(SandboxFailed):
            await backend.restore(second)

    async def test_collect_spares_the_layers_of_live_sandboxes(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("echo 1 > f")
        snapshot = await box.snapshot()
        assert (await backend.collect([])).layers == 0
        fork = await backend.restore(snapshot)
        await box.destroy()
        assert (await backend.collect([])).layers == 0
        assert (await fork.run("cat f")).stdout == "1\n"
        await fork.destroy()
        assert (await backend.collect([])).layers == 1

    async def test_an_unknown_snapshot_is_refused(self, backend: Backend) -> None:
        box = await backend.open()
        ref = (await box.snapshot()).ref
        for kind in ("layer", "base"):
            with pytest.raises(SandboxFailed):
                await backend.restore(SandboxSnapshot(type(ref)(kind, "0123456789abcdef")))

    async def test_a_destroyed_sandbox_refuses_further_calls(self, backend: Backend) -> None:
        box = await backend.open()
        await box.run("true")
        await box.destroy()
        await box.destroy()
        with pytest.raises(SandboxFailed):
            await box.run("true")
        with pytest.raises(SandboxFailed):
            await box.snapshot()

    async def test_starting_twice_is_starting_once(self, backend: Backend) -> None:
        assert await backend.start() == await backend.start()
