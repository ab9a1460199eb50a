"""The demos print the table that ``errata replay`` prints."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from errata_environment.demos import Played
from errata_protocol.turns import turn_from
from errata_server.cli.turn_table import TurnTable
from swe_bench_lite_env.demo import cli as swe
from swe_bench_lite_env.demo import play as swe_play
from terminal_env.demo import cli as terminal

TURNS = [
    turn_from(
        1,
        "step",
        {"tool": "run", "command": "cat a[1].txt \x1b[2J"},
        {
            "observation": {
                "exit_code": 1,
                "error_kind": "path_not_found",
                "error_site": {"action_field": "command", "action_span": [4, 12]},
                "hint_template_key": "fs.missing",
                "duration_s": 0.5,
            },
            "reward": 0.0,
        },
    ),
    turn_from(2, "step", {"tool": "submit"}, {"observation": {}, "reward": 1.0, "done": True}),
]


def shown_by_terminal(console: Console) -> None:
    terminal._show(console, Played("ep_x", "a-task", turns=TURNS))


def shown_by_swe(console: Console) -> None:
    result: Any = swe_play.Result("an-instance", Path("data"), issue="It breaks.")
    swe._show(console, result, Played("ep_x", turns=TURNS))


@pytest.mark.parametrize("show", [shown_by_terminal, shown_by_swe])
def test_a_demo_prints_the_table_of_replay(show: Any) -> None:
    by_demo, by_replay = io.StringIO(), io.StringIO()
    show(Console(file=by_demo, width=160))
    table = TurnTable(by_replay)
    for turn in TURNS:
        table.add(turn)
    table.end()
    assert by_replay.getvalue() in by_demo.getvalue()
    assert "cat «a[1].txt» \\x1b[2J" in by_demo.getvalue() and "\x1b" not in by_demo.getvalue()
