"""The whole way: client, socket, sessions, journal, environment, sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from errata_client import ErrataClient
from errata_protocol.errors import ErrataError
from errata_protocol.replay import observation_of
from errata_server.process import ServerProcess
from terminal_env import SPEC, TerminalAction, TerminalEnv, TerminalObservation

pytestmark = pytest.mark.sandbox


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data_dir: Path) -> Iterator[ServerProcess]:
    with ServerProcess("terminal", data_dir, env={"ERRATA_TEST_CANARY": "host-secret"}) as made:
        yield made


async def test_state_at_of_200_steps_is_what_was_sent_and_what_the_agent_read(tmp_path: Path) -> None:
    with ServerProcess("terminal", tmp_path) as server:
        async with TerminalEnv(server.url, durable=True) as env:
            first = await env.reset()
            read = [SPEC.agent_text(first.observation)]
            for t in range(1, 201):
                command = f"echo {t} >> log; tail -2 log" if t % 3 else f"cat missing-{t}"
                read.append(SPEC.agent_text((await env.step(TerminalAction(command=command))).observation))
            live = [await env.state_at(t) for t in range(201)]
            received = await env.history()
            assert [s.payload for s in live] == [s.payload for s in received]
            assert [SPEC.agent_text(observation_of(json.loads(s.payload))) for s in live] == read
            assert (await env.state()).step_count == 200
            eid, sid = env.eid, env.session_id
        server.kill()
    with ServerProcess("terminal", tmp_path) as server:
        async with TerminalEnv(server.url, session_id=sid) as env:
            assert (env.eid, env.t) == (eid, 200)
            assert [(await env.state_at(t)).payload for t in range(201)] == [s.payload for s in live]
            after = (await env.step(TerminalAction(command="wc -l < log"))).observation
            assert after.stdout.strip() == "134"


async def test_a_fork_has_the_parents_files_and_shell_and_neither_sees_the_other(server: ServerProcess) -> None:
    async with TerminalEnv(server.url) as parent:
        await parent.reset()
        for command in ("mkdir d && cd d && export WHO=parent", "echo one > f", "echo two > f", "rm f; WHO=later"):
            await parent.step(TerminalAction(command=command))
        child = await parent.fork(2)
        assert (await child.state()).step_count == 0
        assert (await child.state_at(0)).digest == (await parent.state_at(2)).digest
        seen = (await child.step(TerminalAction(command="pwd; echo $WHO; cat f; echo child > f"))).observation
        assert seen.stdout == "/workspace/d\nparent\none\n"
        gone = (await parent.step(TerminalAction(command="ls; echo $WHO"))).observation
        assert gone.stdout == "later\n"
        again = await child.fork(1)
        assert (await again.step(TerminalAction(command="cat f"))).observation.stdout == "child\n"


async def test_the_shells_directory_carries_over_and_is_told(server: ServerProcess) -> None:
    async with TerminalEnv(server.url) as env:
        assert (await env.reset()).observation.cwd == "/workspace"
        moved = (await env.step(TerminalAction(command="mkdir -p a/b && cd a/b"))).observation
        assert moved.cwd == "/workspace/a/b" == (await env.state()).cwd
        broken = (await env.step(TerminalAction(command="echo 'x = (' > m.py; python3 m.py"))).observation
        assert broken.error_kind == "syntax_error" and broken.error_site is not None
        assert broken.error_site.file == "a/b/m.py" and broken.error_site.line == 1


async def test_an_unknown_tool_is_a_marked_observation(server: ServerProcess) -> None:
    async with TerminalEnv(server.url) as env:
        await env.reset()
        seen: TerminalObservation = (await env.step(TerminalAction(tool="grep", command="x"))).observation
        assert seen.error_kind == "tool_not_found" and seen.hint_template_key == "tool.unknown"
        assert seen.error_site is not None
        assert (seen.error_site.action_field, seen.error_site.action_span) == ("tool", (0, 4))
        assert seen.error_site.t == 1
        assert "tool_not_found" not in SPEC.agent_text(seen) and "tool.unknown" not in SPEC.agent_text(seen)


async def test_the_servers_environment_and_the_hosts_paths_are_invisible(server: ServerProcess, data_dir: Path) -> None:
    async with TerminalEnv(server.url) as env:
        await env.reset()
        look = (
            "env; cat /proc/{self,1}/environ /proc/1/cmdline /proc/self/mountinfo /proc/mounts | tr '\\0' '\\n'; "
            f"ls -d {Path.home()}/.cache {data_dir} {Path(__file__).parent}; cat /proc/1/cgroup; hostname"
        )
        seen = (await env.step(TerminalAction(command=look))).observation
        text = seen.stdout
        assert "host-secret" not in text and str(data_dir) not in text and str(Path(__file__).parents[2]) not in text
        assert os.uname().nodename not in text or os.uname().nodename == "sandbox"


async def test_a_broken_sandbox_is_an_exception_with_a_code_and_no_observation(tmp_path: Path) -> None:
    with ServerProcess("terminal", tmp_path) as server:
        async with TerminalEnv(server.url, durable=True) as env:
            await env.reset()
            await env.step(TerminalAction(command="echo 1 > f"))
            layers = tmp_path / "sandboxes" / "layers"
            hidden = tmp_path / "hidden"
            layers.rename(hidden)
            with pytest.raises(ErrataError) as caught:
                await env.step(TerminalAction(command="echo 2 >> f; cat f"))
            assert caught.value.code in ("SANDBOX_FAILED", "SANDBOX_UNAVAILABLE")
            if layers.exists():
                subprocess.run(["rm", "-r", str(layers)], check=True)
            hidden.rename(layers)
            again = (await env.step(TerminalAction(command="echo 2 >> f; cat f"))).observation
            assert again.stdout == "1\n2\n" and env.t == 2


async def test_deleted_episodes_leave_no_layer(tmp_path: Path) -> None:
    with ServerProcess("terminal", tmp_path) as server:
        eids: list[Any] = []
        for _ in range(2):
            async with TerminalEnv(server.url) as env:
                await env.reset(task_id="access-report")
                await env.step(TerminalAction(command="echo 1 > f"))
                eids.append(env.eid)
        layers = tmp_path / "sandboxes" / "layers"
        assert len(list(layers.iterdir())) >= 2
        for eid in eids:
            deleted = httpx.delete(f"{server.url}/episodes/{eid}").json()["deleted"]
            assert deleted >= 2, "reset and step, and the close where that was recorded"
        assert list(layers.iterdir()) == []


async def test_a_thousand_forks_of_one_state_cost_no_disk_of_their_own(server: ServerProcess, data_dir: Path) -> None:
    async with TerminalEnv(server.url) as env:
        await env.reset()
        await env.step(TerminalAction(command="head -c 5000000 /dev/urandom > big"))
        eid = env.eid
        before = _disk(data_dir / "sandboxes")
        early = httpx.Limits(keepalive_expiry=1.0)  # the server lets go of what is idle for 5 s, as httpx would: a race
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=early) as http:

            async def fork(n: int) -> dict[str, Any]:
                answer = await http.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": f"r{n}"})
                return dict(answer.json())

            made: list[dict[str, Any]] = []
            for start in range(0, 1000, 50):
                made += await asyncio.gather(*(fork(n) for n in range(start, start + 50)))
        assert len({m["session_id"] for m in made}) == 1000
        assert _disk(data_dir / "sandboxes") == before
        async with TerminalEnv(server.url, session_id=made[777]["session_id"]) as child:
            assert (await child.step(TerminalAction(command="stat -c %s big"))).observation.stdout == "5000000\n"


def _disk(directory: Path) -> int:
    return int(
        subprocess.run(["du", "-s", str(directory)], check=True, capture_output=True, text=True).stdout.split()[0]
    )


async def test_a_vanilla_openenv_client_runs_a_task(server: ServerProcess) -> None:
    from openenv.core.generic_client import GenericEnvClient

    async with GenericEnvClient(base_url=server.url) as env:
        await env.reset(task_id="file-permissions")
        seen = await env.step({"tool": "run", "command": "cat nope"})
        assert seen.observation["error_kind"] == "path_not_found"
        assert seen.observation["metadata"]["error_kind"] == "path_not_found"
        final = await env.step({"tool": "submit"})
        assert final.done and final.reward == 0.0
        assert (await env.state())["step_count"] == 2


async def test_our_client_is_not_needed_to_attach_again(server: ServerProcess) -> None:
    client: ErrataClient[Any, Any, Any] = ErrataClient(server.url, durable=True)
    async with client:
        await client.reset()
        await client.step({"command": "cd /tmp"})
        sid = client.session_id
    async with ErrataClient(server.url, session_id=sid) as again:
        assert (await again.step({"command": "pwd"})).observation["stdout"] == "/tmp\n"
