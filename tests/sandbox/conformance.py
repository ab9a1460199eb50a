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
from errata_server.sandbox.spec import Directory, Entry, File, SandboxSpec, SpecRefused

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

    # What stands there before the first command

    @pytest.mark.parametrize("workdir", ["/app", "/testbed", "/home/x/app", "/usr/src/app", "/opt", "/home/agent"])
    async def test_a_work_directory_is_there_and_is_the_agents(self, backend: Backend, workdir: str) -> None:
        box = await backend.open(spec=SandboxSpec(workdir=workdir))
        assert (box.workdir, box.cwd) == (workdir, workdir)
        result = await box.run("pwd; mkdir d; echo text > d/f; cat d/f; rm -r d; ls")
        assert (result.exit_code, result.stdout, result.stderr) == (0, f"{workdir}\ntext\n", "")
        await box.write_file("f", b"relative")
        assert await box.read_file(f"{workdir}/f") == b"relative"

    async def test_a_fork_and_a_clean_state_keep_the_work_directory(self, backend: Backend) -> None:
        box = await backend.open(spec=SandboxSpec(workdir="/app"))
        first = await box.snapshot()
        await box.run("mkdir d; cd d; echo 1 > f")
        second = await box.snapshot()
        for snapshot, cwd in ((first, "/app"), (second, "/app/d"), (SandboxSnapshot(second.ref), "/app")):
            fork = await backend.restore(snapshot)
            assert (fork.workdir, fork.cwd) == ("/app", cwd)
            assert (await fork.run("echo x > y; pwd; echo $PWD")).stdout == f"{cwd}\n{cwd}\n"
        later = await backend.restore(await (await backend.restore(second)).snapshot())
        assert later.workdir == "/app"

    async def test_a_work_directory_that_the_base_has_is_kept_all_the_same(self, backend: Backend) -> None:
        box = await backend.open(spec=SandboxSpec(workdir="/tmp"))
        fork = await backend.restore(SandboxSnapshot((await box.snapshot()).ref))
        assert (fork.workdir, (await fork.run("pwd")).stdout) == ("/tmp", "/tmp\n")

    async def test_an_empty_work_directory_has_nothing_of_the_base(self, backend: Backend) -> None:
        specs = [SandboxSpec("/var/lib/dpkg", mtime_s=1, empty=empty) for empty in (True, True, False)]
        box, other, whole = [await backend.open(spec=spec) for spec in specs]
        assert (await box.run("ls")).stdout == ""
        digests = [await one.merged_digest() for one in (box, other, whole)]
        assert digests[0] == digests[1]
        assert (digests[1] == digests[2]) == ((await whole.run("ls")).stdout == "")
        assert (await box.run("mkdir info; echo 1 > info/f; cat info/f")).stdout == "1\n"
        fork = await backend.restore(await box.snapshot())
        assert (await fork.run("ls; ls info")).stdout == "info\nf\n"

    async def test_a_sandbox_without_a_spec_has_the_workspace(self, backend: Backend) -> None:
        for spec in (None, SandboxSpec()):
            box = await backend.open(spec=spec)
            assert (box.workdir, box.cwd) == ("/workspace", "/workspace")
            snapshot = await box.snapshot()
            assert (snapshot.ref.kind, snapshot.shell) == ("base", b"")

    async def test_variables_of_the_spec_carry_over_like_exported_ones(self, backend: Backend) -> None:
        spec = SandboxSpec(env={"GREETING": "it's $HOME \\n", "HOME": "/app", "EMPTY": ""}, workdir="/app")
        box = await backend.open(spec=spec)
        fork = await backend.restore(await box.snapshot())
        for one in (box, fork):
            result = await one.run('echo "$GREETING"; echo $HOME; echo "[$EMPTY]"; echo $TZ; export GREETING=new; pwd')
            assert result.stdout == "it's $HOME \\n\n/app\n[]\nUTC\n/app\n"
            assert (await one.run("echo $GREETING; echo $HOME")).stdout == "new\n/app\n"

    async def test_a_clean_command_sees_no_variable_of_the_spec(self, backend: Backend) -> None:
        box = await backend.open(spec=SandboxSpec(env={"WORD": "x", "PATH": "/nowhere"}))
        assert (await box.run("echo [$WORD]; cat /dev/null", clean=True)).stdout == "[]\n"

    async def test_files_stand_where_the_spec_wants_them(self, backend: Backend) -> None:
        entries = (
            File("/app/src/main.py", b"print(1)\n", 0o755, "agent"),
            File("/etc/task.conf", b"key = value\n"),
            File("/etc/task.conf", b"the last one counts\n"),
            Directory("/data/in", 0o755, "agent"),
            File("/app/bytes", bytes(range(256)), owner="agent"),
        )
        box = await backend.open(spec=SandboxSpec("/app", entries=entries))
        result = await box.run("cat src/main.py /etc/task.conf; ls /data; echo 2 > src/main.py; echo 3 > /data/in/f")
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == "print(1)\nthe last one counts\nin\n"
        assert await box.read_file("bytes") == bytes(range(256))
        fork = await backend.restore(SandboxSnapshot((await box.snapshot()).ref))
        assert (await fork.run("cat src/main.py /data/in/f; echo 4 > /data/in/g")).stdout == "2\n3\n"

    async def test_equal_specs_have_equal_digests_and_others_have_others(self, backend: Backend) -> None:
        def spec(content: bytes) -> SandboxSpec:
            return SandboxSpec("/app", entries=(File("/etc/x", content), Directory("/app/d", owner="agent")))

        one, two, other = [await backend.open(spec=spec(content)) for content in (b"1", b"1", b"2")]
        digests = [await box.merged_digest() for box in (one, two, other)]
        assert digests[0] == digests[1] != digests[2]
        assert (await one.snapshot()).ref.digest == (await two.snapshot()).ref.digest

    async def test_files_of_the_spec_do_not_count_against_the_session(self, backend: Backend) -> None:
        limits = Limits(disk_bytes=1024**2, file_size_bytes=1024**2)
        entries = (File("/app/large", b"x" * 3 * 1024**2, owner="agent"),)
        box = await backend.open(limits=limits, spec=SandboxSpec("/app", entries=entries))
        result = await box.run("echo 1 > small; cat small")
        assert (result.exit_code, result.limit_hit, result.stdout) == (0, None, "1\n")

    @pytest.mark.parametrize(
        ("entry", "why"),
        [
            (File("/etc", b""), "Is a directory"),
            (Directory("/etc/passwd/x"), "Not a directory"),
            (File("/etc/passwd/x", b""), "Not a directory"),
            (Directory("/etc/passwd"), "Not a directory"),
        ],
    )
    async def test_an_entry_where_the_base_has_something_else_is_refused(
        self, backend: Backend, entry: Entry, why: str
    ) -> None:
        known = File("/etc/passwd", b"agent\n")
        with pytest.raises(SpecRefused, match=f"entry {entry.path}: {why}"):
            await backend.open(spec=SandboxSpec(entries=(known, entry)))
        assert (await (await backend.open()).run("pwd")).stdout == "/workspace\n"
