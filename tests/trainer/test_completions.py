"""The table of completions: what TRL prints, with the turns that failed highlighted."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pandas
import pytest
from rich.console import Console
from test_trl_channels import NO_SITE, TEXTS, TWO_SITES, made, scripts

from errata_protocol.capabilities import Capabilities
from errata_server.process import ServerProcess
from errata_trainer.episodes.served import viewer_of
from errata_trainer.monitoring.completions import FAILED, completion_table, conversation, described
from errata_trainer.tiny import tiny_tokenizer

READ = {"function": {"name": "read", "arguments": {"path": "x"}}}
SUBMIT = {"function": {"name": "submit", "arguments": '{"word": "owl"}'}}
MESSAGES = [
    {"role": "assistant", "content": "I read it.", "tool_calls": [READ]},
    {"role": "tool", "name": "read", "content": "no file x"},
    {"role": "assistant", "reasoning_content": "so it is red", "content": "", "tool_calls": [SUBMIT]},
]


def test_a_failing_turn_is_highlighted_with_its_key_and_no_other_is() -> None:
    text = conversation(MESSAGES, {0: "fs.missing"})
    marked = [text.plain[span.start : span.end] for span in text.spans if span.style == FAILED]
    assert marked == [" fs.missing", "\nI read it.\nread(path='x')"]
    assert "submit(word='owl')" in text.plain and "so it is red" in text.plain
    assert not any(span.style == FAILED for span in conversation(MESSAGES).spans)


def test_a_table_shows_as_many_rows_as_it_may() -> None:
    def lines(most: int | None) -> str:
        out = io.StringIO()
        prompts = [f"task {n}" for n in range(4)]
        marked = [{0: "fs.missing"}, {}, {}, {}]
        Console(file=out, width=120).print(
            completion_table(
                prompts,
                [MESSAGES] * 4,
                {"reward": [1.0, None, 0.5, 0.0]},
                [0.1, 0.2, 0.3, 0.4],
                marked,
                step=7,
                most=most,
            )
        )
        return out.getvalue()

    assert all(f"task {n}" in lines(None) for n in range(4)) and "Step 7" in lines(None)
    assert sum(f"task {n}" in lines(2) for n in range(4)) == 2
    assert described({3: "b", 1: "a"}) == "turn 1 a, turn 3 b"


def test_below_the_table_a_row_has_the_link_of_its_episode_and_of_its_first_error() -> None:
    def below(viewers: list[str]) -> list[str]:
        out = io.StringIO()
        eids, marked = ["ep_a", "ep_b", "ep_c", ""], [{0: "fs.missing"}, {}, {0: "fs.missing"}, {}]
        Console(file=out, width=40).print(
            completion_table(
                ["task"] * 4, [MESSAGES] * 4, {}, [0.0] * 4, marked, step=1, extra={"eid": eids}, viewers=viewers
            ),
            crop=False,
        )
        return [line.rstrip() for line in out.getvalue().splitlines() if "errata replay" in line]

    here, there = "http://127.0.0.1:8000/viewer/", "http://other:8000/shelf/viewer/"
    assert below([here, there, "", here]) == [
        f"  0  errata replay ep_a  {here}#ep_a/error",
        f"  1  errata replay ep_b  {there}#ep_b",
        "  2  errata replay ep_c",
    ]
    assert below([]) == [f"  {row}  errata replay ep_{name}" for row, name in enumerate("abc")]


class Offering:
    """Stands in for a session whose server has some extensions; None for a vanilla server."""

    def __init__(self, *extensions: str, vanilla: bool = False) -> None:
        offered = Capabilities(environment="shelf", extensions=dict.fromkeys(extensions, 1))
        self._capabilities = None if vanilla else offered

    def capabilities(self) -> Capabilities | None:
        return self._capabilities


def test_a_server_without_states_has_no_viewer_and_an_address_has_no_secrets() -> None:
    url = "ws://user:secret@host:8000/shelf/?token=secret"
    assert viewer_of(Offering("mux", "state_at"), url) == "http://host:8000/shelf/viewer/"
    assert viewer_of(Offering("mux"), url) == "", "production mode"
    assert viewer_of(Offering(vanilla=True), url) == ""
    assert viewer_of(Offering("mux", "state_at"), "ray://errata") == "", "a fleet whose members each have one"


def test_training_prints_it_and_files_and_trackers_get_the_column(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = tiny_tokenizer(TEXTS)
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES, NO_SITE), log_completions=True, num_completions_to_print=3,
    )  # fmt: skip
    trainer.train()
    out = capsys.readouterr().out
    assert out.count("Step 1") == 1, "TRL's own table is not printed beside it"
    assert "fs.missing" in out
    links = re.findall(rf"(?m)^ *\d  errata replay (ep_\S+)  {re.escape(server.url)}/viewer/#(ep_\S+?)(/error)?$", out)
    assert len(links) == 3 and all(eid == link for eid, link, _ in links), "whole, in a terminal of any width"
    below = out[out.index("Step 1") :]
    for number in (r"same reward in \d+% of groups", r"calls [\d.]+ a rollout", r"\d+ of \d+ failing turns distilled"):
        assert re.search(rf"(?m)^{number}$", below)
    (path,) = (tmp_path / "completions").glob("*00001.parquet")
    table = pandas.read_parquet(path)
    assert sorted(table["errors"]) == ["", "", *["turn 0 fs.missing, turn 1 fs.missing"] * 2]
    eids = [environment._runner.eid for environment in trainer.environments]
    assert set(table["eid"]) == set(eids) and len(set(eids)) == 4
    errors = table.set_index("eid")["errors"]
    assert all(bool(errors[eid]) == bool(at_error) for eid, _, at_error in links)
    (replay,) = re.findall(r"step 1/1, .*, errata replay (\S+)", out)
    assert errors[replay], "the line names an episode with errors"
