"""Recipes: what loads, and what an error says to write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swe_bench_lite_env.dataset import Dataset
from swe_bench_lite_env.recipes import RecipeInvalid, RecipeMissing, Recipes, load_recipes, read_recipe


def recipe(**keys: Any) -> dict[str, Any]:
    return {
        "instance_id": "owner__name-1",
        "source": {"kind": "sdist", "name": "name", "version": "1.0", "sha256": "0" * 64},
        "python": "3.9",
        "test_command": "pytest -rA t.py",
        **keys,
    }


def test_every_row_of_lite_has_a_recipe(lite: Dataset, lite_recipes: Recipes) -> None:
    assert set(lite_recipes) == set(lite.ids)
    for instance in lite:
        found = lite_recipes.find(instance.instance_id, instance.repo)
        assert found.source.kind == "sdist" and len(found.source.sha256) == 64
        assert found.runner == "pytest" and found.install == ("pip install -e .",)
        assert len(instance.excluding(found.exclude_pass_to_pass).pass_to_pass) >= 2


def test_a_recipe_survives_the_way_back(lite_recipes: Recipes, tmp_path: Path) -> None:
    values = [one.values() for one in lite_recipes.values()]
    (tmp_path / "again.json").write_text(json.dumps(values))
    again = load_recipes(tmp_path / "again.json")
    assert [one.values() for one in again.values()] == values
    assert [one.digest for one in again.values()] == [one.digest for one in lite_recipes.values()]


@pytest.mark.parametrize("form", ["list", "object", "lines"])
def test_a_file_of_recipes_is_a_list_an_object_or_json_lines(tmp_path: Path, form: str) -> None:
    recipes = [recipe(), recipe(instance_id="owner__name-2", source={"kind": "git"}, runner="django")]
    path = tmp_path / ("r.jsonl" if form == "lines" else "r.json")
    keyed = {one["instance_id"]: {k: v for k, v in one.items() if k != "instance_id"} for one in recipes}
    lines = "\n".join(map(json.dumps, recipes))
    path.write_text(lines if form == "lines" else json.dumps(recipes if form == "list" else keyed))
    loaded = load_recipes(path)
    assert list(loaded) == ["owner__name-1", "owner__name-2"]
    assert loaded["owner__name-2"].runner == "django"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"source": None}, 'write "source": {"kind": "sdist"'),
        ({"source": {"kind": "svn"}}, "with a kind of sdist, git, tree, directory"),
        ({"source": {"kind": "sdist", "name": "x"}}, 'needs "version"'),
        ({"source": {"kind": "tree"}}, 'needs "path"'),
        ({"source": {"kind": "git", "name": "x"}}, "unknown key 'name'"),
        ({"source": {"kind": "sdist", "name": "x", "version": 2}}, "have to be text"),
        ({"source": {"kind": "sdist", "name": "x", "version": "2", "sha256": "abc"}}, "64 hexadecimal digits"),
        ({"python": None}, 'write "python": "3.9"'),
        ({"python": "2.7"}, 'write "python": "3.9"'),
        ({"python": 3.9}, 'write "python": "3.9"'),
        ({"test_command": " "}, 'write "test_command"'),
        ({"pins": "pytest"}, 'write "pins"'),
        ({"install": [1]}, 'write "install"'),
        ({"exclude_pass_to_pass": [""]}, 'write "exclude_pass_to_pass"'),
        ({"env": {"A B": "c"}}, 'write "env"'),
        ({"env": {"A": 1}}, 'write "env"'),
        ({"runner": "nose"}, "one of pytest, django, sympy"),
        ({"pin": ["x"]}, "unknown key 'pin'"),
    ],
)
def test_what_is_wrong_says_what_to_write(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(RecipeInvalid) as caught:
        read_recipe(recipe(**keys), "r.json recipe 3")
    assert said in str(caught.value)
    assert "r.json recipe 3 (owner__name-1)" in str(caught.value)


@pytest.mark.parametrize("content", ["[", "3", "[3]", '[{"python": "3.9"}]'])
def test_a_file_that_holds_no_recipes_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "r.json").write_text(content)
    with pytest.raises(RecipeInvalid, match=r"r\.json"):
        load_recipes(tmp_path / "r.json")


def test_two_recipes_of_one_instance_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps([recipe(), recipe()]))
    with pytest.raises(RecipeInvalid, match="two recipes of owner__name-1"):
        load_recipes(tmp_path / "r.json")
    with pytest.raises(RecipeInvalid, match="No such file"):
        load_recipes(tmp_path / "none.json")


def test_a_missing_recipe_is_an_error_that_holds_one() -> None:
    with pytest.raises(RecipeMissing, match="`errata swe recipe` drafts one") as caught:
        Recipes({}, "r.json").find("owner__name-9", "owner/name")
    example = json.loads(str(caught.value).split("or write ", 1)[1])
    assert read_recipe(example).instance_id == "owner__name-9"


def test_paths_of_a_source_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps([recipe(source={"kind": "directory", "path": "repos/one"})]))
    assert load_recipes(tmp_path / "r.json")["owner__name-1"].source_path == tmp_path.resolve() / "repos/one"


def test_the_digest_changes_with_every_key_that_shapes_the_run() -> None:
    first = read_recipe(recipe())
    for keys in ({"python": "3.10"}, {"pins": ["a==1"]}, {"env": {"A": "1"}}, {"test_command": "pytest"}):
        assert read_recipe(recipe(**keys)).digest != first.digest
    assert read_recipe(recipe(pins=[], env={}), root=Path("/elsewhere")).digest == first.digest
