"""The harness itself: what fails is told and loses nothing else, and a small whole run gives a report of the schema."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import jsonschema
import pytest

from errata_bench import cli, machine, page_cache, suite, table
from errata_bench.budgets import Budget
from errata_bench.figures import Round
from errata_bench.report import Report
from errata_bench.scenario import Found, Metric, Plan, Scenario, alternate
from errata_bench.scenarios import SCENARIOS, terminal
from tests.hangs import HANGS_S

ROOT = Path(__file__).parents[2]


def plan(tmp_path: Path, rounds: int = 3) -> Plan:
    return Plan(
        sessions=10,
        rounds=rounds,
        seconds=0.1,
        sockets=1,
        directory=tmp_path,
        smoke=False,
        progress=lambda line: None,
    )


def arm(order: list[str], name: str, value: float, fails: bool = False) -> Callable[[], Awaitable[Round]]:
    async def measure() -> Round:
        order.append(name)
        if fails and order.count(name) == 2:
            raise ConnectionError("gone")
        return {"steps_per_s": value}

    return measure


def scenario(run: Callable[[Plan], Awaitable[Found]]) -> Scenario:
    budget = Budget("ours", "steps_per_s", ">=", 2, to="stock", at=10)
    return Scenario("one", "one of them", run, (Metric("steps_per_s", "steps a second", "1/s"),), (budget,))


async def test_arms_take_turns_first_forwards_then_backwards(tmp_path: Path) -> None:
    order: list[str] = []
    found = await alternate(plan(tmp_path), {"a": arm(order, "a", 1), "b": arm(order, "b", 2)})
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [round["steps_per_s"] for round in found.arms["b"]] == [2, 2, 2]


async def test_an_arm_that_fails_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    order: list[str] = []

    async def run(how: Plan) -> Found:
        return await alternate(how, {"stock": arm(order, "stock", 1), "ours": arm(order, "ours", 3, fails=True)})

    report = await suite.run(scenario(run), plan(tmp_path), "errata bench --only one")
    assert order.count("stock") == 3
    assert order.count("ours") == 2
    assert report.status == "partly"
    assert report.failed_arms == {"ours": "ConnectionError: gone"}
    assert [figure.arm for figure in report.figures] == ["stock"]
    assert report.budgets[0].met is None


async def test_a_scenario_that_fails_is_a_report_with_its_reason(tmp_path: Path) -> None:
    async def run(how: Plan) -> Found:
        raise OSError("no such server")

    report = await suite.run(scenario(run), plan(tmp_path), "errata bench --only one")
    assert (report.status, report.reason, report.figures) == ("failed", "OSError: no such server", [])


async def test_a_budget_is_judged_on_the_ratio_of_each_round(tmp_path: Path) -> None:
    async def run(how: Plan) -> Found:
        return Found(
            {
                "stock": [{"steps_per_s": 1.0}, {"steps_per_s": 10.0}, {"steps_per_s": 1.0}],
                "ours": [{"steps_per_s": 3.0}, {"steps_per_s": 11.0}, {"steps_per_s": 2.5}],
            }
        )

    report = await suite.run(scenario(run), plan(tmp_path), "errata bench --only one")
    (judged,) = report.budgets
    assert (judged.measured, judged.met, judged.must) == (2.5, True, ">= 2 x stock")
    (ours,) = [figure for figure in report.figures if figure.arm == "ours"]
    assert ours.ratio is not None
    assert ours.ratio.rounds == [3.0, 1.1, 2.5]


async def test_an_arm_of_ours_is_compared_with_the_same_arm_of_the_second_interpreter(tmp_path: Path) -> None:
    async def run(how: Plan) -> Found:
        assert how.errata_servers == ("errata", "against")
        return Found(
            {
                "errata, mux": [{"steps_per_s": 3.0}, {"steps_per_s": 11.0}, {"steps_per_s": 2.5}],
                "against, mux": [{"steps_per_s": 2.0}, {"steps_per_s": 10.0}, {"steps_per_s": 5.0}],
            }
        )

    how = dataclasses.replace(plan(tmp_path), against=Path("/elsewhere/python"), stock=False)
    report = await suite.run(scenario(run), how, "errata bench --only one")
    assert report.baseline is None
    ours, against = report.figures
    assert ours.against is not None
    assert ours.against.rounds == [1.5, 1.1, 0.5]
    assert (ours.ratio, against.ratio, against.against) == (None, None, None)
    header, _, row, _ = list(table.scenario_lines(report))[2:]
    assert header.split() == ["median", "rounds", "to", "against", "rounds"]
    assert " ".join(row.split()) == "errata, mux 3.00 2.50 to 11.0 1.100 x 0.50 to 1.50"


async def test_more_sockets_than_a_process_may_have_are_refused_before_anything_runs(tmp_path: Path) -> None:
    async def run(how: Plan) -> Found:
        raise AssertionError("ran")

    too_many = Plan(10**9, 1, 0.1, 1, tmp_path, False, lambda line: None)
    report = await suite.run(scenario(run), too_many, "errata bench")
    assert report.status == "failed"
    assert "limit of open files" in report.reason


def test_every_budget_is_on_a_figure_of_its_scenario() -> None:
    assert len({scenario.name for scenario in SCENARIOS}) == len(SCENARIOS)
    for found in SCENARIOS:
        keys = {metric.key for metric in found.metrics}
        assert {budget.key for budget in found.budgets} <= keys, found.name


def test_scenarios_are_chosen_by_name_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert [s.name for s in suite.chosen(SCENARIOS, ["resume", "opens"])] == ["opens", "resume"]
    assert {s.name for s in suite.chosen(SCENARIOS, [], smoke=True)} < {s.name for s in SCENARIOS}
    assert cli.main(["--only", "everything"]) == 2
    assert "no scenario everything; there are: opens" in capsys.readouterr().err


def test_a_scenario_without_pairs_and_an_interpreter_that_is_no_other_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"opens", "steps-any-thread", "steps-async"} <= {s.name for s in suite.chosen(SCENARIOS, [], pairs=True)}
    assert cli.main(["--no-stock", "--only", "opens", "restart"]) == 2
    assert "restart cannot run with --against or --no-stock" in capsys.readouterr().err
    assert cli.main(["--only", "opens", "--against", sys.executable]) == 2
    assert "has the same installation" in capsys.readouterr().err
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    assert cli.main(["--only", "opens", "--against", str(bare)]) == 2
    assert "cannot import Errata (ModuleNotFoundError: " in capsys.readouterr().err


def test_a_directory_in_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if machine.file_system(Path("/dev/shm")) not in machine.IN_MEMORY:
        pytest.skip("/dev/shm is no tmpfs here")
    assert cli.main(["--only", "resume", "--data-dir", f"/dev/shm/{tmp_path.name}"]) == 2
    Path(f"/dev/shm/{tmp_path.name}").rmdir()
    assert "in memory: give a --data-dir" in capsys.readouterr().err


def test_the_file_system_is_that_of_the_longest_mount_above(tmp_path: Path) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n/dev/b /elsewhere xfs rw 0 0\n"
    assert machine.file_system(tmp_path / "in", mounts) == "tmpfs"
    assert machine.file_system(tmp_path.parent, mounts) == "ext4"


def test_what_was_read_is_cached_and_what_was_dropped_is_not(tmp_path: Path) -> None:
    if machine.file_system(tmp_path) in machine.IN_MEMORY:
        pytest.skip("a file in memory has nothing else to be read from")
    file = tmp_path / "file"
    file.write_bytes(os.urandom(1024**2))
    assert page_cache.drop([file]) == 0
    page_cache.fill([file])
    assert page_cache.cached_share([file]) == 1


def on_path() -> str:
    """Return the import path of processes of the benchmark."""
    return os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])


def test_the_benchmarks_own_process_does_not_import_gradio() -> None:
    code = (
        "import sys; from errata_bench import cli, stage; cli.main(['--list']); stage.target('async')\n"
        "sys.exit('gradio' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": on_path()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANGS_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_run_that_is_stopped_leaves_no_server_behind_and_prints_its_report(tmp_path: Path) -> None:
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "errata_bench", "--quick", "--only", "steps-async", "--no-stock"),
            *("--sessions", "2", "--data-dir", str(tmp_path)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": on_path()},
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "steps-async: 2 sessions" in line:
            break
    while not (below := terminal.descendants(running.pid)):
        time.sleep(0.02)  # a process that is about to start says nothing
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=HANGS_S)
    assert running.returncode == cli.INTERRUPTED, out + err
    assert "SMOKE RUN" in out
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Run the benchmark in this process, small; the servers and load generators are processes of their own."""
    monkeypatch.setenv("PYTHONPATH", on_path())
    handler, descriptors = signal.getsignal(signal.SIGTERM), resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda *words: cli.main(["--quick", *words])
    signal.signal(signal.SIGTERM, handler)
    resource.setrlimit(resource.RLIMIT_NOFILE, descriptors)


def test_a_small_run_measures_another_interpreter_and_leaves_stock_out(
    quick: Callable[..., int], tmp_path: Path
) -> None:
    elsewhere = shutil.copytree(ROOT / "server" / "errata_server", tmp_path / "other" / "errata_server").parent
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={elsewhere}:"$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    out = tmp_path / "report.json"
    words = ["--only", "steps-async", "--sessions", "4", "--seconds", "0.1", "--no-stock", "--against", str(python)]
    assert quick(*words, "--json", str(out), "--data-dir", str(tmp_path / "data")) == 0
    report = Report.model_validate_json(out.read_text())
    assert report.against is not None
    assert report.against.location == str(elsewhere / "errata_server")
    (ran,) = report.scenarios
    assert f"--against {python} --no-stock" in ran.command
    steps = {figure.arm: figure for figure in ran.figures if figure.key == "steps_per_s"}
    assert list(steps) == [f"{name}, mux, frames of {n}" for n in (1, 64) for name in ("errata", "against")]
    for n in (1, 64):
        ours, other = steps[f"errata, mux, frames of {n}"], steps[f"against, mux, frames of {n}"]
        assert ours.against is not None
        assert ours.against.median == pytest.approx(ours.values.median / other.values.median, rel=1e-4)


def test_a_small_run_against_both_servers_gives_a_report_of_the_schema(
    quick: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    words = ["--only", "plain-async", "--sessions", "4", "--seconds", "0.1", "--json", str(out)]
    assert quick(*words, "--data-dir", str(tmp_path / "data")) == 0
    out_text = capsys.readouterr().out
    assert "SMOKE RUN" in out_text
    assert re.search(r"\$ errata bench --only plain-async --quick --sessions 4 ", out_text)
    told = json.loads(out.read_text())
    jsonschema.validate(told, Report.model_json_schema(by_alias=True))
    report = Report.model_validate(told)
    (ran,) = report.scenarios
    steps = {figure.arm: figure for figure in ran.figures if figure.key == "steps_per_s"}
    assert steps.keys() == {"stock", "errata, plain sockets"}
    ours = steps["errata, plain sockets"]
    assert ours.ratio is not None
    assert ours.ratio.median == pytest.approx(ours.values.median / steps["stock"].values.median, rel=1e-4)
    assert report.smoke
    assert all(judged.met is None for judged in ran.budgets)
    assert list((tmp_path / "data").iterdir()) == []
