"""The commands of fleets on a cluster, as far as they go without one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from errata_protocol.errors import ErrataError, InvalidRequest
from errata_ray import directories
from errata_server.cli.commands import cli
from errata_server.fleet_engines import ENGINES


def refusal(*arguments: str) -> str:
    error = CliRunner().invoke(cli, ["fleet", *arguments]).exception
    assert isinstance(error, ErrataError)
    return error.message


def test_a_command_that_names_no_cluster_says_which_option_does() -> None:
    assert "give --ray" in refusal("status")
    assert "give --ray" in refusal("up", "terminal")


def test_names_that_are_none_and_a_shared_fleet_without_a_directory_are_refused() -> None:
    assert "lower-case letters" in refusal("status", "--ray", "--name", "../x")
    assert "--shared needs --data-dir" in refusal("up", "terminal", "--ray", "--shared")


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("errata_ray.engine", "errata_ray.source"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InvalidRequest, match=r"pip install .*\[fleet\]'"):
        type(ENGINES)("errata.fleet_engines", object, "engine of fleets").load("ray")
    with pytest.raises(InvalidRequest, match=r"pip install .*\[fleet\]'"):
        __import__("errata_ray.source")


def test_a_fleets_directories_are_those_that_have_the_names_of_their_shards(tmp_path: Path) -> None:
    place = directories.home(tmp_path / "{node}", "n0")
    assert place == tmp_path / "n0" and directories.found(place) == []
    first, second = directories.make(place), directories.make(place)
    (place / "other").mkdir()
    (place / "copy").mkdir()
    (place / "copy" / "shard").write_text(f"{first}\n")
    (place / ".new-1").mkdir()
    assert directories.found(place) == sorted([first, second])
    assert directories.epoch(place, first) == 0
    newest = place / first / "epochs" / f"{7:020d}"
    newest.mkdir(parents=True)
    (newest / "shard").write_text(f"{first}\n")
    assert directories.found(place) == sorted([first, second]) and directories.epoch(place, first) == 7
