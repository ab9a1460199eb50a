"""Profiles of hardening: which programs a session's commands have, what a blocked call shows, and what grading has."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from errata_environment.grading.forks import forked
from errata_protocol.environment import Snapshot
from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, CommandResult, Sandbox
from swe_bench_lite_env import SweObservation, agent_text
from swe_bench_lite_env.server.environment import SweBenchLiteEnvironment
from swe_bench_lite_env.server.episode import Episode
from swe_bench_lite_env.server.hardening import PROFILES, blocked_places
from swe_bench_lite_env.server.prepare.store import Prepared
from swe_bench_lite_env.server.workspaces import GRADING_LIMITS

from .sessions import NAME, begun, call, instance

pytestmark = [pytest.mark.sandbox, pytest.mark.usefixtures("real", "store")]

LIST = "find . -name '*.py' -newer /etc/passwd -o -name pyproject.toml"


@pytest.fixture
def store(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_STORE", str(tmp_path_factory.getbasetemp() / "swe-store"))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_PROFILE", "strict")


async def run(environment: SweBenchLiteEnvironment, command: str) -> SweObservation:
    return await call(environment, "run", command=command)


def blocked(seen: SweObservation, name: str = "find") -> bool:
    marked = (seen.error_kind, seen.hint_template_key) == ("policy_violation", "policy.blocked")
    assert marked == (f"{name}: is blocked by the policy of this environment" in seen.stdout + seen.stderr)
    return marked


@pytest.mark.parametrize("profile", ["off", "default"])
async def test_find_is_an_ordinary_program_without_strict(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_PROFILE", profile)
    environment = SweBenchLiteEnvironment()
    first = await environment.reset_async(instance_id=NAME)
    assert first.blocked_programs == [] and "blocked" not in agent_text(first)
    seen = await run(environment, LIST)
    assert (seen.exit_code, seen.error_kind) == (0, None) and "pyproject.toml" in seen.stdout
    await environment.aclose()


@pytest.mark.usefixtures("strict")
async def test_strict_blocks_find_by_each_way_to_it() -> None:
    environment = SweBenchLiteEnvironment()
    first = await environment.reset_async(instance_id=NAME)
    assert "find" in first.blocked_programs and set(first.blocked_programs) <= set(PROFILES["strict"])
    assert "These programs are blocked: find" in agent_text(first)
    seen = await run(environment, LIST)
    assert blocked(seen) and (seen.exit_code, seen.stdout) == (126, "")
    assert seen.error_site is not None and seen.error_site.action_span == (0, 4)
    for command in (
        f"cd src && {LIST}; cd ..",
        f"{LIST} 2>/dev/null | head -3",
        f"x=$({LIST} 2>&1 >/dev/null); true",
        "/usr/bin/find .",
        "/bin/find .",
        "command find . && echo found",
        "echo . | xargs find",
        "python3 -c \"import subprocess; subprocess.run(['find', '.'], stderr=subprocess.DEVNULL)\"",
        "ln -s /usr/bin/find /tmp/mine; bash -c 'exec -a find /usr/bin/find .'",
        "rm -f /usr/bin/find; cp /bin/ls /usr/bin/find; umount /usr/bin/find; find .",
    ):
        seen = await run(environment, command)
        assert blocked(seen), command
        assert "pyproject" not in seen.stdout, command
    await environment.aclose()


@pytest.mark.usefixtures("strict")
async def test_strict_marks_by_what_ran_and_not_by_the_text() -> None:
    environment = await begun()
    for command in (
        "echo find . unzip",
        "grep -rn find . || true",
        "git ls-files | head -3  # find",
        "printf '#!/bin/sh\\necho mine\\n' > /tmp/find; chmod +x /tmp/find; /tmp/find",
        "true || find .",
        "find() { echo a function; }; find; unset -f find",
    ):
        seen = await run(environment, command)
        assert not blocked(seen) and seen.error_kind is None, (command, seen.stderr)
    assert "src" in (await call(environment, "search", pattern="def ", path="src")).stdout
    await environment.aclose()


@pytest.mark.usefixtures("strict")
async def test_gradings_and_files_know_nothing_of_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {}
    for profile in ("strict", "off"):
        monkeypatch.setenv("ERRATA_SWE_PROFILE", profile)
        environment = await begun()
        await run(environment, "find . > /dev/null; echo 1 > new")
        backend, sandbox = environment._backend, environment._sandbox
        assert backend is not None and sandbox is not None
        final = await sandbox.snapshot()
        states[profile] = final.ref.digest
        async with forked(backend, final, limits=GRADING_LIMITS) as fork:
            result = await fork.run("find /testbed -name new", clean=True)
            assert result.stdout == "/testbed/new\n", "the tests of a repository may call it"
        assert (await call(environment, "apply_patch", patch=instance().patch)).error_kind is None
        assert (await call(environment, "submit")).reward == 1.0
        await environment.aclose()
    assert states["strict"] == states["off"]


@pytest.mark.parametrize(("before", "after"), [("strict", "default"), ("default", "strict")])
async def test_an_episode_keeps_the_profile_that_it_began_under(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ERRATA_SWE_PROFILE", before)
    environment = await begun()
    saved = await environment.snapshot()
    monkeypatch.setenv("ERRATA_SWE_PROFILE", after)
    restored, forked_one = SweBenchLiteEnvironment(), SweBenchLiteEnvironment()
    await restored.restore(saved)
    await forked_one.restore(saved)
    await forked_one.forked("child")
    for one in (environment, restored, forked_one):
        assert blocked(await run(one, "find .")) == (before == "strict")
        await one.aclose()
    anew = await begun()
    assert blocked(await run(anew, "find .")) == (after == "strict")
    await anew.aclose()


async def test_a_snapshot_that_names_no_profile_is_of_the_default() -> None:
    environment = await begun()
    saved = await environment.snapshot()
    record: dict[str, Any] = json.loads(saved.state)
    del record["profile"], record["blocked"]
    episode, _ = Episode.read(Snapshot(json.dumps(record).encode(), saved.refs), "a session")
    assert (episode.profile, episode.blocked) == ("default", ())
    await environment.aclose()


async def test_a_profile_that_is_none_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_PROFILE", "paranoid")
    with pytest.raises(EnvironmentFailed, match="ERRATA_SWE_PROFILE: Input should be 'off', 'default' or 'strict'"):
        SweBenchLiteEnvironment()


async def test_a_program_that_is_many_is_not_taken_away() -> None:
    class Busy:
        async def run(self, command: str, **_: Any) -> CommandResult:
            return CommandResult(exit_code=0, stdout="/bin/busybox\n", stderr="", duration_s=0.0)

    class Nothing:
        pass

    prepared = SimpleNamespace(digest="d", env={}, instance=instance())
    with pytest.raises(EnvironmentFailed, match="part of /bin/busybox"):
        await blocked_places(cast("Backend", Nothing()), cast("Sandbox", Busy()), cast("Prepared", prepared), "strict")
