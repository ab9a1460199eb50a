"""The kit on servers of bundled, foreign and odd environments: what the environment does is no fault of its server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from openenv.core.env_server.http_server import create_app

from errata_conformance.cli import main
from errata_conformance.report import as_text
from errata_conformance.results import Outcome, Result
from errata_conformance.server_side.generated import MAX_VALUES, objects
from errata_conformance.server_side.probe import TALLY, Probe, guess
from errata_conformance.server_side.run import prepared, run, selected
from errata_conformance.server_side.target import Target
from errata_server.process import ServerProcess
from tests.hangs import HANGS_S

from ..openenv_source import ENVIRONMENTS, needs_openenv_source
from ..server.local_server import LocalServer
from .conftest import RFCS, in_thread, sample
from .environments import EndsAtOnce, Grid, Move, Seen, TakesNothing
from .test_kit import bad

ROOM = "tests.conformance.environments"


def held(url: str, only: tuple[str, ...] = (), **options: Any) -> tuple[str, dict[str, set[Outcome]], list[Result]]:
    """Check a server as the command does; return what the kit says of the actions, and the outcomes by statement."""

    async def checked() -> tuple[str, list[Result]]:
        target = Target(url, **options)
        name = await prepared(target)
        checks = [one for one in selected(RFCS, None, only) if not one.body.__module__.endswith("check_faults")]
        return name, await run(target, checks)

    name, results = asyncio.run(checked())
    outcomes: dict[str, set[Outcome]] = {}
    for one in results:
        outcomes.setdefault(one.statement, set()).add(one.outcome)
    return name, outcomes, results


# -- odd environments --------------------------------------------------------------------------------------------------

FORKS = ("R-015-17", "R-015-18", "R-015-25", "R-016-39")


@pytest.mark.kit
@pytest.mark.parametrize(
    ("name", "given", "passed", "says"),
    [
        ("Grid", {}, (*FORKS, "R-015-4", "R-015-22", "R-016-16"), "guessed from /schema"),
        ("EndsAtOnce", {}, (*FORKS, "R-015-4", "R-015-9", "R-015-22", "R-016-16", "R-016-21"), "ends after 1 step"),
        ("Judge", {}, (*FORKS, "R-014-1", "R-014-4", "R-014-6", "R-014-9", "R-014-14"), "ends after 1 step"),
        ("EndsSilently", {}, (*FORKS, "R-015-4", "R-016-16"), "ends after 4 steps"),
        ("TakesNothing", {}, FORKS, "guessed"),
        ("TakesTask", {"probe": Probe(reset={"task": "a"})}, FORKS, "guessed"),
        ("NoSeed", {}, ("R-016-16",), "guessed"),
        ("ResetsSlowly", {"reply_s": 0.3}, FORKS, "guessed"),
        ("Alone", {}, ("R-015-9", "R-016-15"), "guessed"),
        ("Dice", {}, FORKS, "from run to run differ: total"),
        ("CountsForks", {}, (*FORKS, "R-015-22"), "from run to run differ: total"),
        ("Picky", {}, FORKS, "guessed"),
    ],
)
def test_nothing_is_broken_on(
    name: str, given: dict[str, Any], passed: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    with LocalServer(f"{ROOM}:{name}", tmp_path) as server:
        found, outcomes, results = held(server.url, **given)
    assert bad(results) == [], as_text(results)
    assert says in found
    for statement in passed:
        assert outcomes[statement] <= {Outcome.PASSED, Outcome.NOT_TESTED, Outcome.NOT_APPLICABLE}, statement
        assert Outcome.PASSED in outcomes[statement], f"{statement}: {as_text(results)}"


@pytest.mark.kit
@pytest.mark.parametrize(("name", "why"), [("Refuses", "not today"), ("TakesTask", "reset takes task")])
def test_an_environment_on_which_nothing_works_is_named(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalServer(f"{ROOM}:{name}", tmp_path) as server:
        assert main([server.url, "--only", "R-015-9", "-q"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]  # the server writes there, too
    assert why in line and "--probe FILE" in line


@pytest.mark.kit
def test_the_address_of_several_environments_leads_to_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalServer([f"{ROOM}:Grid", f"{ROOM}:Dice"], tmp_path) as server:
        assert main([server.url, "-q"]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert f"{server.url}/Grid, {server.url}/Dice" in line
        assert main([f"{server.url}/Grid", "--only", "R-015-9", "-q"]) == 0


# -- wrong servers of such environments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defect", "statement", "bears"),
    [
        ("child-is-fresh", "R-015-17", 2),
        ("child-shares", "R-015-18", 1),
        ("injected-refused", "R-015-26", 1),
        ("repeat-unchecked", "R-016-16", 1),
    ],
)
def test_a_wrong_server_is_caught_with_one_action_and_short_episodes(defect: str, statement: str, bears: int) -> None:
    with sample(defect) as url:
        target = Target(url, replace(TALLY, step=({"n": 2},), marked=()))

        async def checked() -> list[Result]:
            await prepared(target)
            target.bears = bears
            return await run(target, selected(RFCS, None, (statement,)))

        results = asyncio.run(checked())
    assert [one[: len(statement)] for one in bad(results)] == [statement], as_text(results)


# -- bundled environments, echo, the scaffold, stock -------------------------------------------------------------------


@pytest.mark.kit
@pytest.mark.parametrize("name", ["terminal", "swe_bench_lite"])
def test_a_bundled_environment_passes_with_its_own_probe(name: str, tmp_path: Path) -> None:
    with ServerProcess(name, tmp_path) as server:
        found, outcomes, results = held(server.url)
    assert bad(results) == [], as_text(results)
    assert found == "of GET /conformance/probe"
    left = {one for one, came in outcomes.items() if Outcome.NOT_TESTED in came}
    assert left == {"R-015-29", "R-015-31", "R-016-43", "R-016-45"}, as_text(results)  # tokens, and production mode


@pytest.fixture(scope="module")
def scaffold(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``openenv init my_env`` makes."""
    directory = tmp_path_factory.mktemp("scaffold")
    command = [str(Path(sys.executable).parent / "openenv"), "init", "my_env"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=HANGS_S)
    return directory / "my_env"


@pytest.mark.kit
@pytest.mark.parametrize("options", [(), ("--deterministic", "--max-sessions", "64")], ids=["default", "forkable"])
def test_the_scaffold_passes(options: tuple[str, ...], scaffold: Path, tmp_path: Path) -> None:
    with ServerProcess(str(scaffold), tmp_path, *options) as server:
        found, outcomes, results = held(server.url)
    assert bad(results) == [], as_text(results)
    assert found == "echo"
    forks = Outcome.PASSED if options else Outcome.NOT_SUPPORTED
    for statement in ("R-015-18", "R-015-22", "R-015-25", "R-016-39"):
        assert outcomes[statement] == {forks}, as_text(results)


@pytest.mark.kit
@needs_openenv_source
def test_echo_passes_with_calls_of_its_tools(tmp_path: Path) -> None:
    with ServerProcess(str(ENVIRONMENTS / "echo_env"), tmp_path, "--deterministic") as server:
        _found, outcomes, results = held(server.url)
    assert bad(results) == [], as_text(results)
    for statement in ("R-014-17", "R-015-3", "R-015-18", "R-015-25", "R-016-39", "R-016-16"):
        assert outcomes[statement] == {Outcome.PASSED}, as_text(results)


@contextmanager
def stock(environment: Any) -> Iterator[str]:
    """Serve an environment with OpenEnv's own server, in a thread; yield its URL."""
    app = create_app(environment, Move, Seen, max_concurrent_envs=8)
    with in_thread(uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", ws="websockets-sansio"))) as url:
        yield url


@pytest.mark.kit
@pytest.mark.parametrize("environment", [Grid, EndsAtOnce, TakesNothing])
def test_stock_openenv_breaks_nothing(environment: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with stock(environment) as url:
        assert main([url, "--profile", "0.10", "--json", "-q"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["broken"], report["not_followed"], report["extensions"]) == ([], [], {})
    found = {one["statement"] for one in report["results"] if one["outcome"] == "finding"}
    assert found == {"base.array", "base.binary"}
    assert report["counts"]["not supported"] > 55


# -- probes ------------------------------------------------------------------------------------------------------------


def test_a_probe_that_the_server_offers_is_taken() -> None:
    for offered, name, step in (
        ({"step": [{"n": 7}], "machine": None}, "of GET /conformance/probe", ({"n": 7},)),
        ({"steps": []}, "tally (GET /conformance/probe has none: a probe is an object", TALLY.step),
    ):
        with sample(probe=offered) as url:
            target = Target(url)
            found = asyncio.run(prepared(target))
        assert found.startswith(name) and target.probe.step == step


def test_a_field_that_is_null_is_not_applicable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "probe.json").write_text(json.dumps({"step": [{"n": 2}, {"n": 3}], "machine": None}))
    with sample() as url:
        assert main([url, "--only", "R-014-18", "R-016-41", "--probe", str(tmp_path / "probe.json")]) == 0
    printed = capsys.readouterr().out
    assert "not applicable: R-014-18: no action of the environment is `machine`, says the probe" in printed
    assert "not tested: R-016-41: the probe has no `not_finite`" in printed


@pytest.mark.parametrize(
    ("found", "why"),
    [
        ([], "a probe is an object"),
        ({"step": None}, "step is a list of actions"),
        ({"step": ["a"]}, "step is a list of actions"),
        ({"volatile": [1]}, "volatile is a list of names"),
        ({"fails": 1}, "fails is an object"),
        ({"slow": {}}, "slow and slow_s go together"),
        ({"slow_s": 1.0}, "slow and slow_s go together"),
        ({"any_injected_state": 1}, "any_injected_state is true or false"),
    ],
)
def test_a_probe_of_another_form_is_refused(found: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Probe.of(found)


def test_values_are_made_from_what_schemas_say() -> None:
    schema = Move.model_json_schema()
    first, second, *_ = objects(schema)
    assert first == {"direction": "north", "cell": {"row": 1}, "kind": "walk", "cells": [{"row": 1}]}
    assert second["direction"] == "south" and second["cell"] == {"row": 2} and second["kind"] == "run"
    union = {
        "oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        "$defs": {
            "A": {"type": "object", "properties": {"kind": {"const": "a"}}, "required": ["kind"]},
            "B": {
                "type": "object",
                "properties": {
                    "kind": {"const": "b"},
                    "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
                    "name": {"type": ["null", "string"], "minLength": 3, "maxLength": 4},
                    "below": {"type": "integer", "maximum": -5, "multipleOf": 5},
                },
                "required": ["kind", "share", "name", "below"],
            },
        },
    }
    made = list(objects(union, 2))
    assert made == [{"kind": "a"}, {"kind": "b", "share": 0.5, "name": "baa", "below": made[1]["below"]}]
    assert made[1]["below"] <= -5 and made[1]["below"] % 5 == 0


def test_a_hostile_schema_makes_no_more_values_than_allowed() -> None:
    nested: dict[str, Any] = {"type": "object", "properties": {str(n): {"$ref": "#"} for n in range(50)}}
    nested["properties"] |= {
        "many": {"type": "array", "minItems": 10**9},
        "text": {"type": "string", "minLength": 10**9},
    }

    def count(value: Any) -> int:
        members = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return 1 + sum(map(count, members))

    for value in objects(nested, 1):
        assert count(value) <= 2 * MAX_VALUES
    for wrong in (
        {"properties": 1},
        {"required": 1},
        {"enum": {}},
        {"anyOf": [1]},
        {"allOf": [{"$ref": 1}]},
        {"type": []},
    ):
        list(objects({"type": "object", "properties": {"x": wrong}, "required": ["x"]}))
        list(objects(wrong))
    assert guess({"type": "object", "properties": {"metadata": {}}})[1].step == ({},)


# -- MUST and SHOULD ---------------------------------------------------------------------------------------------------


def test_a_should_is_not_followed_and_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    with sample("child-counts-on") as url:
        assert main([url, "--only", "R-015-22"]) == 0
        text = capsys.readouterr().out
        assert main([url, "--only", "R-015-22", "--strict", "--json"]) == 1
    assert "not followed: R-015-22 (SHOULD)" in text and "BROKEN" not in text and "1 not followed" in text
    report = json.loads(capsys.readouterr().out)
    assert [one["statement"] for one in report["not_followed"]] == ["R-015-22"] and report["broken"] == []
