"""The benchmark's images by name: what they are called, the recipes that rows stand for, and where there are none."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from errata_protocol.errors import EnvironmentFailed
from swe_bench_lite_env.programs.cli import main
from swe_bench_lite_env.recipes import RecipeInvalid, load_recipes
from swe_bench_lite_env.server.offered import BUNDLED, offered
from swe_bench_lite_env.server.prepare.images import image_name, image_recipes
from swe_bench_lite_env.server.settings import SweSettings, read_settings

from .preparing import instance

DJANGO = {"instance_id": "Django__django-11099", "repo": "django/django", "version": "3.0"}


@pytest.mark.parametrize(
    ("place", "row", "name"),
    [
        ("swebench:latest", {}, "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"),
        ("swebench", {}, "swebench/sweb.eval.x86_64.django_1776_django-11099:latest"),
        ("host.example:5000/mine:v2", {}, "host.example:5000/mine/sweb.eval.x86_64.django_1776_django-11099:v2"),
        ("host.example:5000/mine", {}, "host.example:5000/mine/sweb.eval.x86_64.django_1776_django-11099:latest"),
        ("none", {}, "sweb.eval.x86_64.django__django-11099:latest"),
        ("none:v2", {}, "sweb.eval.x86_64.django__django-11099:v2"),
        ("swebench", {"image_name": "own/image:3"}, "own/image:3"),
        ("swebench", {"docker_image": "host.example:5000/image"}, "host.example:5000/image:latest"),
        ("swebench", {"image_name": "image"}, "image:latest"),
    ],
)
def test_an_image_has_the_name_of_its_row_or_the_benchmarks(place: str, row: dict[str, Any], name: str) -> None:
    assert image_name(instance(**DJANGO, **row), place) == name


def test_a_row_stands_for_a_recipe_and_a_given_one_only_says_what_differs(tmp_path: Path) -> None:
    rows = [instance(), instance(instance_id="own__ledger-2"), instance(instance_id="own__ledger-3")]
    changes = [
        {"instance_id": "own__ledger-1", "env": {"LANG": "en_US.UTF-8"}, "exclude_pass_to_pass": ["test_a.py::test_b"]},
        {"instance_id": "own__ledger-2", "source": {"kind": "git"}, "python": "3.9", "pins": ["pytest"]},
    ]
    (tmp_path / "r.json").write_text(json.dumps(changes))
    found = load_recipes(tmp_path / "r.json", defaults=image_recipes(rows, "swebench"))
    assert sorted(found) == ["own__ledger-1", "own__ledger-2", "own__ledger-3"]
    first, second, third = (found[f"own__ledger-{number}"] for number in (1, 2, 3))
    assert first.source.name == "swebench/sweb.eval.x86_64.own_1776_ledger-1:latest"
    assert first.test_command == "pytest -rA test_ledger.py" and first.env == {"LANG": "en_US.UTF-8"}
    assert (second.source.kind, second.python, third.source.kind, third.python) == ("git", "3.9", "image", "base")
    assert load_recipes(None, defaults=image_recipes(rows[2:], "swebench"))["own__ledger-3"] == third
    assert image_recipes(rows, None) == {}


def test_what_is_installed_on_an_image_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps([{"instance_id": "own__ledger-1", "pins": ["pytest==7.4.4"]}]))
    with pytest.raises(RecipeInvalid, match="takes no pins and no install"):
        load_recipes(tmp_path / "r.json", defaults=image_recipes([instance()], "swebench"))


def test_a_server_offers_rows_with_images_and_no_recipes(tmp_path: Path) -> None:
    rows = [instance().row() | {"split": "dev"}, instance(instance_id="own__ledger-2").row() | {"split": "test"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = offered(SweSettings(dataset=str(tmp_path / "rows.jsonl"), images="none:v3"))
    assert (found.default, sorted(found.splits), found.broken) == ("dev", sorted(["dev", BUNDLED]), {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for split, number in (("dev", 1), ("test", 2)):
            _, row = found.find(f"own__ledger-{number}", split)
            assert found.recipe(split, row).source.name == f"sweb.eval.x86_64.own__ledger-{number}:v3"


def test_images_without_a_data_set_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_SWE_IMAGES", "swebench")
    with pytest.raises(EnvironmentFailed, match="need ERRATA_SWE_DATASET"):
        read_settings()


def test_a_backend_without_images_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ERRATA_SANDBOX", "fake")
    inputs = ["--dataset", str(tmp_path / "rows.jsonl"), "--store", str(tmp_path / "store")]
    (tmp_path / "rows.jsonl").write_text(json.dumps(instance().row()) + "\n")
    assert main(["prepare", *inputs, "--images"]) == 2
    said = capsys.readouterr().err
    assert (
        "the sandbox backend fake has no images: set ERRATA_SANDBOX=docker; or `errata image export swebench/" in said
    )
    assert main(["prepare", *inputs]) == 2
    assert "--recipes FILE, or build on the benchmark's images with --images" in capsys.readouterr().err
