"""Saving, restoring and forking terminal sessions on real sandboxes (PROTOCOL E1)."""

from __future__ import annotations

import pytest

from errata_server.sandbox.base import Backend
from terminal_env import TerminalAction
from terminal_env.server.environment import TerminalEnvironment

pytestmark = pytest.mark.sandbox


def run(command: str) -> TerminalAction:
    return TerminalAction(command=command)


@pytest.mark.usefixtures("real")
async def test_a_fork_has_the_shell_and_the_files_of_its_step_and_no_more() -> None:
    parent = TerminalEnvironment()
    await parent.reset_async(task_id="git-lost-commit")
    snapshots = [await parent.snapshot()]
    for t in (1, 2, 3):
        await parent.step_async(
            run(f"mkdir -p /workspace/d{t}; cd /workspace/d{t}; export T={t}; echo {t} >> ../count")
        )
        snapshots.append(await parent.snapshot())
    for t in (0, 2, 3):
        child = TerminalEnvironment()
        await child.restore(snapshots[t])
        assert child.state.step_count == t
        seen = await child.step_async(
            run("pwd; echo T=$T; cat /workspace/count 2>/dev/null; git -C /workspace/ledger status -s")
        )
        directory = f"/workspace/d{t}" if t else "/workspace"
        count = "".join(f"{i}\n" for i in range(1, t + 1))
        assert seen.stdout == f"{directory}\nT={t or ''}\n{count}"
        await child.step_async(run("rm -rf /workspace/*"))
        await child.aclose()
    assert (await parent.step_async(run("wc -l < ../count"))).stdout == "3\n"
    await parent.aclose()


@pytest.mark.usefixtures("real")
async def test_a_step_that_changes_no_file_makes_no_layer() -> None:
    environment = TerminalEnvironment()
    await environment.reset_async()
    bare = await environment.snapshot()
    assert [ref.kind for ref in bare.refs] == ["base"], "a bare shell has its variables and no layer"
    await environment.step_async(run("ls -la / | wc -l; export A=1; cd /tmp"))
    assert (await environment.snapshot()).refs == bare.refs
    await environment.step_async(run("echo x > f"))
    assert [ref.kind for ref in (await environment.snapshot()).refs] == ["layer"]
    await environment.aclose()


async def test_submitting_leaves_the_session_and_its_layers_as_they_were(real: Backend) -> None:
    environment = TerminalEnvironment()
    await environment.reset_async(task_id="python-intervals")
    await environment.step_async(run("echo mine > f"))
    before = await environment.snapshot()
    await environment.step_async(TerminalAction(tool="submit"))
    assert (await environment.snapshot()).refs == before.refs
    await environment.aclose()
    continued = TerminalEnvironment()
    await continued.restore(before)
    assert (await continued.step_async(run("cat f; ls"))).stdout == "mine\nf\nintervals\n"
    await continued.aclose()
