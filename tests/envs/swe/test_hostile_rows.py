"""One bad row or recipe: it is left out by name, and every other instance stays usable."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from errata_protocol.errors import InvalidRequest
from swe_bench_lite_env.dataset import DatasetInvalid, load_dataset
from swe_bench_lite_env.recipes import RecipeInvalid, load_recipes
from swe_bench_lite_env.rules.report import PredictionsInvalid, load_predictions
from swe_bench_lite_env.server.offered import BUNDLED, SplitNotOffered, offered, unusable
from swe_bench_lite_env.server.prepare.index import IndexFailed, _html_links, _json_links
from swe_bench_lite_env.server.settings import SweSettings

from .test_dataset import row

DEEP = "[" * 100_000
HOSTILE_ROWS: dict[str, bytes] = {
    "deep tests": json.dumps(row(2, FAIL_TO_PASS=DEEP)).encode(),
    "deep tests in Python": json.dumps(row(2, FAIL_TO_PASS="[" + "-" * 100_000 + "1]")).encode(),
    "nested tests": json.dumps(row(2, FAIL_TO_PASS="['a', ['b']]")).encode(),
    "code for tests": json.dumps(row(2, PASS_TO_PASS="[print(1)]")).encode(),
    "tests of numbers": json.dumps(row(2, FAIL_TO_PASS=[1, 2])).encode(),
    "deep": b'{"a":' * 100_000,
    "deep value": json.dumps({**row(2), "hints_text": 1}).replace('"hints_text": 1', '"hints_text": ' + DEEP).encode(),
    "nan": json.dumps({**row(2), "version": float("nan")}).encode(),
    "infinite": json.dumps({**row(2), "version": 7}).replace('"version": 7', '"version": 1e999').encode(),
    "long number": b'{"instance_id": ' + b"9" * 5000 + b"}",
    "not utf-8": b'{"instance_id": "\xff"}',
    "escapes": json.dumps(row(2, instance_id="\x1b[2J")).encode(),
    "list": b"[1]",
    "null": b"null",
    "no json": b"{",
    "early": json.dumps(row(2, created_at="0001-01-01T00:00:00+14:00")).encode(),
    "repeated": json.dumps(row(1)).encode(),
    "types": json.dumps(row(2, patch={"a": 1})).encode(),
}
RECIPE = {
    "instance_id": "owner__name-1",
    "source": {"kind": "git"},
    "python": "3.9",
    "test_command": "pytest -rA",
}
HOSTILE_RECIPES: dict[str, Any] = {
    "kind": RECIPE | {"instance_id": "other", "source": {"kind": ["git"]}},
    "source": RECIPE | {"instance_id": "other", "source": 5},
    "runner": RECIPE | {"instance_id": "other", "runner": {"a": "\x1b[2J"}},
    "env": RECIPE | {"instance_id": "other", "env": {"A B": "x"}},
    "python": RECIPE | {"instance_id": "other", "python": 3.9},
    "pins": RECIPE | {"instance_id": "other", "pins": "x"},
    "key": RECIPE | {"instance_id": "other", "\x1b[2J": 1},
    "no id": {"python": "3.9"},
    "number": 5,
    "escapes": RECIPE | {"instance_id": "\x1b[2J\n", "python": ""},
}


@pytest.mark.parametrize("what", HOSTILE_ROWS)
def test_a_bad_row_is_left_out_by_its_place(what: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\n".join([json.dumps(row(1)).encode(), HOSTILE_ROWS[what], json.dumps(row(3)).encode(), b""]))
    broken: dict[str, str] = {}
    assert load_dataset(file, broken=broken).ids == ["owner__name-1", "owner__name-3"]
    assert list(broken) == ["rows.jsonl row 2"]
    assert broken["rows.jsonl row 2"].startswith("rows.jsonl row 2") and broken["rows.jsonl row 2"].isprintable()
    with pytest.raises(DatasetInvalid, match="row 2"):
        load_dataset(file)


@pytest.mark.parametrize("what", HOSTILE_RECIPES)
def test_a_bad_recipe_is_left_out_and_named_where_it_is_needed(what: str, tmp_path: Path) -> None:
    file = tmp_path / "recipes.json"
    file.write_text(json.dumps([RECIPE, HOSTILE_RECIPES[what]]))
    broken: dict[str, str] = {}
    recipes = load_recipes(file, broken=broken)
    assert list(recipes) == ["owner__name-1"] and len(broken) == 1
    assert all(text.isprintable() for item in broken.items() for text in item)
    if "other" in broken:
        with pytest.raises(RecipeInvalid, match=r"recipes\.json recipe 2 \(other\)"):
            recipes.find("other")
    with pytest.raises(RecipeInvalid):
        load_recipes(file)


def test_of_two_recipes_of_an_instance_none_is_used(tmp_path: Path) -> None:
    file = tmp_path / "recipes.json"
    file.write_text(json.dumps([RECIPE, RECIPE | {"python": "3.11"}, RECIPE | {"instance_id": "other"}]))
    recipes = load_recipes(file, broken={})
    assert list(recipes) == ["other"]
    with pytest.raises(RecipeInvalid, match="two recipes"):
        recipes.find("owner__name-1")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.txt"])
@pytest.mark.parametrize("kind", ["fifo", "sparse", "directory", "garbage"])
def test_a_file_that_is_none_is_refused_without_waiting(name: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / name
    match kind:
        case "fifo":
            os.mkfifo(file)
        case "sparse":
            with file.open("wb") as made:
                made.truncate(8 * 1024**3)
        case "directory":
            (file / "rows.jsonl").mkdir(parents=True)
        case _:
            file.write_bytes(b"PAR1\x00\x1b[2J\xff" * 100)
    for read in (load_dataset, load_recipes, load_predictions):
        with pytest.raises((InvalidRequest, RecipeInvalid, PredictionsInvalid)):
            read(file)


def test_rows_of_parquet_are_contained_too(tmp_path: Path) -> None:
    rows = [row(1, FAIL_TO_PASS='["a"]'), row(2, FAIL_TO_PASS=DEEP), row(3, FAIL_TO_PASS='["a"]')]
    names = ("repo", "instance_id", "problem_statement", "FAIL_TO_PASS")
    parquet.write_table(pyarrow.table({name: [one[name] for one in rows] for name in names}), tmp_path / "x.parquet")
    broken: dict[str, str] = {}
    assert len(load_dataset(tmp_path / "x.parquet", broken=broken)) == 2 and list(broken) == ["x.parquet row 2"]


def settings(tmp_path: Path, rows: bytes, recipes: str = json.dumps([RECIPE])) -> SweSettings:
    (tmp_path / "rows.jsonl").write_bytes(rows)
    (tmp_path / "recipes.json").write_text(recipes)
    return SweSettings(dataset=str(tmp_path / "rows.jsonl"), recipes=tmp_path / "recipes.json")


def test_a_server_offers_the_good_rows_and_says_which_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = b"\n".join([json.dumps(row(1)).encode(), HOSTILE_ROWS["deep tests"], b""])
    chosen = settings(tmp_path, rows, json.dumps([RECIPE, HOSTILE_RECIPES["kind"]]))
    found = offered(chosen)
    assert found.find("owner__name-1")[1].instance_id == "owner__name-1"
    assert set(found.broken) == {"rows.jsonl row 2", "other"}
    monkeypatch.setenv("ERRATA_SWE_DATASET", str(chosen.dataset))
    monkeypatch.setenv("ERRATA_SWE_RECIPES", str(chosen.recipes))
    assert unusable() == found.broken


@pytest.mark.parametrize(("rows", "recipes"), [(b"", "["), (json.dumps(row(1)).encode(), DEEP), (b"\n", "[]")])
def test_a_data_set_that_cannot_be_read_hides_no_bundled_instance(tmp_path: Path, rows: bytes, recipes: str) -> None:
    found = offered(settings(tmp_path, rows, recipes))
    known = found.splits[BUNDLED].ids[0]
    assert found.choose(known, None, None, None)[1].instance_id == known
    assert found.choose(None, BUNDLED, 0, None)[1].instance_id == known
    if found.unusable:
        with pytest.raises(SplitNotOffered, match="cannot be used"):
            found.choose(None, None, None, 1)  # never a bundled instance in place of the operator's
        with pytest.raises(InvalidRequest, match="cannot be used"):
            found.choose("owner__name-1", None, None, None)


def test_an_index_names_no_path_and_no_digest_that_is_none() -> None:
    page = '<a href="..%2F..%2Fx.whl">x</a><a href="/good-1.0-py3-none-any.whl">y</a><a href="a/%1b%5b2J.whl">z</a>'
    assert [link.filename for link in _html_links(page, "http://index/x/")] == ["good-1.0-py3-none-any.whl"]
    files = [
        {"filename": "../../x.whl", "url": "x"},
        {"filename": "x-1.whl", "url": "x", "hashes": {"sha256": "a" * 64}},
    ]
    assert [link.filename for link in _json_links(json.dumps({"files": files}).encode(), "http://i/")] == ["x-1.whl"]
    for wrong in (b"[1]", b'{"files": [1]}', b'{"files": 5}', DEEP.encode(), b"\xff"):
        with pytest.raises(IndexFailed):
            _json_links(wrong, "http://i/")
    files[1]["hashes"] = {"sha256": "../../../etc"}
    with pytest.raises(IndexFailed, match="sha256"):
        _json_links(json.dumps({"files": files}).encode(), "http://i/")
