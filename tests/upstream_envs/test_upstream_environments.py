"""What ``errata probe`` says of OpenEnv's own environments; docs/forkable.md has the table.

The verdict is made by playing: a verified one means that its session went on after ``kill -9`` and in a fork, served
with exactly these options.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_protocol.environment import Recovery

from ..openenv_source import needs_openenv_source
from .conftest import ROOT, VERDICTS, Installed

HERE = Path(__file__).parent


def _with_actions(name: str) -> list[str]:
    actions = HERE / "actions" / f"{name}.jsonl"
    return ["--actions", str(actions)] if actions.exists() else ["--steps", "16"]


@needs_openenv_source
@pytest.mark.parametrize("name", VERDICTS)
def test_an_environment_has_the_class_that_the_table_says(name: str, installed: Installed) -> None:
    found = installed.probe(name, *_with_actions(name))
    expected = VERDICTS[name]
    assert found["served"] == "none"
    assert found["recovery"] == expected["recovery"], found["why"]
    if found["recovery"] == "none":
        assert found["outcome"] == "impossible" and found["why"] and found["options"] == []
        assert any("def snapshot" in line for line in found["snapshot_lines"])
        return
    assert found["outcome"] == "verified"
    assert _sorted_paths(found["options"]) == _sorted_paths(expected["options"])


def _sorted_paths(options: list[str]) -> list[str]:
    return [",".join(sorted(option.split(","))) for option in options]


def _rows() -> Iterator[str]:
    for name, verdict in sorted(VERDICTS.items()):
        options = verdict.get("options", [])
        yield f"| {name} | {verdict['recovery']} | " + (f"`{' '.join(options)}`" if options else "—")


def test_the_documents_table_has_these_verdicts() -> None:
    table = (ROOT / "docs" / "forkable.md").read_text()
    for row in _rows():
        assert row in table.replace("'", ""), row
    assert sum(Recovery(verdict["recovery"]) is Recovery.REEXECUTE for verdict in VERDICTS.values()) >= 7
