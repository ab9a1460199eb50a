"""``errata journal size|verify|export``: rows of rollouts in both formats, whole and of bounded memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from fastapi.testclient import TestClient
from msgspec.structs import replace
from pyarrow import parquet
from typer.testing import CliRunner

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import NotSupported
from errata_protocol.rollouts import RolloutEpisode, RolloutTurn, Turn, marker_of
from errata_server.app import create_fastapi_app
from errata_server.cli import commands
from errata_server.episodes import rollout_files, rollouts
from errata_server.journal import DeliveryRow, EpisodeRow
from errata_server.journal.codec import LogRecord
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountEnvironment, CountObservation
from .journal_rows import rewrite_journal
from .test_cli import Published

SPEC = EnvironmentSpec(
    name="count",
    factory="tests.server.environments:CountEnvironment",
    action_cls=CountAction,
    observation_cls=CountObservation,
    agent_text=lambda observation: f"n is {observation['n']}",
    agent_text_version="7",
)


@pytest.fixture
def data(tmp_path: Path) -> tuple[Path, str, str]:
    """A directory with an episode that ended (an error, a marker, late rewards) and a fork of it that did not."""
    app = create_fastapi_app(
        CountEnvironment,
        CountAction,
        CountObservation,
        env_name="count",
        max_concurrent_envs=8,
        settings=Settings(data_dir=tmp_path / "data"),
        spec=SPEC,
    )
    with TestClient(app) as client, connect(client) as socket:
        eid: str = socket.ask("reset", {"episode_id": "mine"})["eid"]
        socket.ask("step", {"n": 2, "do": "é 😀"})
        socket.ask("step", {"do": "raise"})
        socket.ask("step", {"do": "mark"})
        socket.ask("step", {"do": "done"})
        fork = client.post(f"/episodes/{eid}/fork", json={"t": 1, "request_id": "f"}).json()["eid"]
        posts = [{"t": 1, "value": v, "source": "me", "reward_id": str(v)} for v in (0.5, -0.25)]
        assert client.post(f"/episodes/{eid}/rewards", json=posts).status_code == 200
        payloads = {f"{eid} {t}": client.get(f"/episodes/{eid}/states/{t}").text for t in range(4)}
    (tmp_path / "payloads.json").write_text(json.dumps(payloads))
    return tmp_path / "data", eid, fork


def journal(command: str, data_dir: Path, *arguments: str) -> Any:
    answer = CliRunner().invoke(commands.cli, ["journal", command, *arguments, "--data-dir", str(data_dir), "--json"])
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        raise answer.exception
    return json.loads(answer.stdout)


def test_a_row_a_turn_has_state_action_rewards_and_marker(data: tuple[Path, str, str], tmp_path: Path) -> None:
    data_dir, eid, fork = data
    out = tmp_path / "turns.jsonl"
    assert journal("export", data_dir, "-o", str(out))["rows"] == 5
    text = out.read_text()
    rows = [RolloutTurn.model_validate_json(line) for line in text.splitlines()]
    assert [(r.eid, r.t, r.kind) for r in rows] == [
        *((eid, t, "step" if t else "reset") for t in range(4)),
        (fork, 0, "reset"),
    ]
    payloads = json.loads((tmp_path / "payloads.json").read_text())
    assert [r.state_t for r in rows[:4]] == [payloads[f"{eid} {t}"] for t in range(4)]
    assert json.loads(rows[1].action_t or "") == {"n": 2, "do": "é 😀"}
    assert (rows[1].reward_t, rows[1].late_reward_t) == (1.0, 0.25)
    assert [r.value for r in rows[1].late_rewards_t] == [0.5, -0.25] and rows[0].late_reward_t is None
    (failed,) = rows[1].errors_t
    assert (failed.code, failed.message) == ("EXECUTION_ERROR", "boom") and rows[2].errors_t == []
    marker = rows[2].error_marker_t
    assert marker is not None and (marker.error_kind, marker.severity) == ("nonzero_exit", "error")
    assert marker.error_site is not None and (marker.error_site.t, marker.error_site.action_span) == (2, (0, 4))
    assert [r.error_marker_t is None for r in rows] == [True, True, False, True, True]
    assert [r.done for r in rows] == [False, False, False, True, False]
    assert (rows[4].origin_eid, rows[4].origin_t, rows[4].digest) == (eid, 1, rows[1].digest)
    assert rows[0].schema_version == 1 and rows[0].episode_id == "mine" and rows[0].agent_text_t is None
    assert "principal" not in text


@pytest.mark.parametrize("by", ["turn", "episode"])
def test_parquet_and_json_lines_hold_the_same_rows(
    data: tuple[Path, str, str], tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_dir, *_ = data
    monkeypatch.setattr(rollouts, "published", lambda: {"count": Published(SPEC)})
    monkeypatch.setattr(rollout_files, "GROUP_ROWS", 2)
    lines, table = tmp_path / "x.jsonl", tmp_path / "x.parquet"
    options = ("--by", by, "--agent-text")
    journal("export", data_dir, "-o", str(lines), *options)
    told = journal("export", data_dir, "-o", str(table), "--format", "parquet", *options)
    read = parquet.read_table(table)
    assert read.schema.metadata[b"errata_schema_version"] == b"1" and told["rows"] == read.num_rows
    assert parquet.ParquetFile(table).num_row_groups == (3 if by == "turn" else 1)
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert read.to_pylist() == rows
    turns = rows if by == "turn" else [turn for row in rows for turn in row["turns"]]
    assert [turn["agent_text_t"] for turn in turns] == ["n is 0", "n is 2", "n is 4", "n is 5", "n is 2"]


def test_an_episode_row_sums_up_its_turns(data: tuple[Path, str, str], tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    journal("export", data[0], "-o", str(out), "--by", "episode", "--no-state")
    first, second = (RolloutEpisode.model_validate_json(line) for line in out.read_text().splitlines())
    assert (first.eid, first.reward, first.late_reward, first.done, len(first.turns)) == (data[1], 2.0, 0.25, True, 4)
    assert (second.late_reward, second.done) == (None, False)
    assert all(turn.state_t is None and turn.digest for turn in first.turns)


def test_rows_are_chosen_by_environment_end_and_time(data: tuple[Path, str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "x.jsonl")

    def rows(*options: str) -> int:
        return int(journal("export", data[0], "-o", out, *options)["rows"])

    assert rows("--done") == 4
    assert rows("--environment", "count") == 5 and rows("--environment", "none") == 0
    assert rows("--since", "1h") == 5 and rows("--since", "2999-01-01") == 0
    wrong = ["journal", "export", "-o", out, "--data-dir", str(data[0])]
    for options in (["--since", "soon"], ["--format", "csv"], ["--by", "day"]):
        assert CliRunner().invoke(commands.cli, [*wrong, *options]).exit_code == 2


def test_text_that_another_version_would_make_is_left_out_and_said(
    data: tuple[Path, str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "x.jsonl"
    journal("export", data[0], "-o", str(out), "--agent-text")
    assert all(json.loads(line)["agent_text_t"] is None for line in out.read_text().splitlines())
    assert "agent_text_t of 5 turns is left out" in caplog.text and "agent_text 7" in caplog.text


def test_without_pyarrow_the_extra_is_named_and_no_file_is_left(
    data: tuple[Path, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(NotSupported, match=r"pip install .*\[parquet\]"):
        journal("export", data[0], "-o", str(tmp_path / "x.parquet"), "--format", "parquet")
    assert not list(tmp_path.glob("x.parquet*"))


def test_the_parquet_columns_are_the_models_fields() -> None:
    turn = rollout_files._schema(pyarrow, "turn")
    assert set(turn.names) == set(RolloutTurn.model_fields)
    episode = rollout_files._schema(pyarrow, "episode")
    assert set(episode.names) == set(RolloutEpisode.model_fields)
    inner = episode.field("turns").type.value_type
    assert {inner.field(n).name for n in range(inner.num_fields)} == set(Turn.model_fields)


@pytest.mark.parametrize(
    ("payload", "kind"),
    [
        ({"observation": {"error_kind": "timeout", "error_site": {"t": 3}}}, "timeout"),
        ({"observation": {"metadata": {"error_kind": "a"}}}, "a"),
        ({"observation": {}, "metadata": {"error_kind": "b", "error_site": {"line": "no"}}}, "b"),
        ({"result": {"_meta": {"openenv/error_markers": {"error_kind": "c"}}}}, "c"),
        ({"error": {"code": -32602, "data": {"openenv/error_markers": {"error_kind": "d"}}}}, "d"),
        ({"error": {"code": -32602, "data": None}, "result": None}, None),
        ({"observation": {"error_kind": None}, "result": {"_meta": 1}}, None),
        ([], None),
    ],
)
def test_a_marker_is_found_wherever_its_environment_puts_it(payload: Any, kind: str | None) -> None:
    marker = marker_of(payload)
    assert (marker.error_kind if marker is not None else None) == kind


def test_size_adds_up_by_environment_and_names_the_files(data: tuple[Path, str, str]) -> None:
    told = journal("size", data[0])
    assert told["environments"]["count"] == told["total"]
    assert (told["total"]["episodes"], told["total"]["deliveries"]) == (2, 5)
    assert told["total"]["payload_bytes"] > 5 * 20 and told["files"]["journal"] > 0
    shown = CliRunner().invoke(commands.cli, ["journal", "size", "--data-dir", str(data[0])]).stdout
    assert "count" in shown and "files: journal" in shown


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        ({"payload": b"{}"}, "does not match its digest"),
        (None, "not in the journal"),
        ({"payload": b"\xff"}, "utf-8"),
        ({"origin_t": 0}, "from which it was forked"),
    ],
)
def test_a_damaged_journal_is_found_with_its_place(
    data: tuple[Path, str, str], damage: dict[str, Any] | None, what: str
) -> None:
    data_dir, eid, fork = data
    assert journal("verify", data_dir) == {
        "ok": True, "episodes": 2, "deliveries": 5, "errors": 1, "rewards": 2, "problems": [], "notes": []
    }  # fmt: skip

    def change(record: LogRecord) -> LogRecord | None:
        if isinstance(record, EpisodeRow) and record.origin_eid == eid and damage == {"origin_t": 0}:
            return replace(record, origin_t=0)
        if isinstance(record, DeliveryRow) and (record.eid, record.t) == (eid, 1) and damage != {"origin_t": 0}:
            return replace(record, **damage) if damage is not None else None
        return record

    rewrite_journal(data_dir / "journal", change)
    answer = CliRunner().invoke(commands.cli, ["journal", "verify", "--data-dir", str(data_dir)])
    assert answer.exit_code == 1 and what in answer.stdout and (eid in answer.stdout or fork in answer.stdout)
