"""Recipes are drafted from the benchmark's specifications, or from set-up files and what the index had at the time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from errata_protocol.errors import InvalidRequest
from swe_bench_lite_env.programs.cli import main
from swe_bench_lite_env.recipes import load_recipes, read_recipe
from swe_bench_lite_env.server.prepare import draft as drafts
from swe_bench_lite_env.server.prepare.draft import draft, specifications
from swe_bench_lite_env.server.prepare.index import Link, PackageIndex, Sources
from swe_bench_lite_env.server.prepare.sources import SourceMissing

from .preparing import dump, files, instance, mirror


class Shelf(PackageIndex):
    """An index whose releases a test lists, each with its day."""

    def __init__(
        self, directory: Path, releases: dict[str, list[tuple[str, str]]], asks: dict[str, str] | None = None
    ) -> None:
        super().__init__(directory, Sources(()))
        for name, listed in releases.items():
            links = []
            for version, day in listed:
                sdist = f"{name}-{version}.tar.gz"
                links.append(Link(sdist, f"https://x/{sdist}", "a" * 64, asks.get(version, ""), None, day))
            self._links[name] = tuple(links)


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shelf:
    monkeypatch.setattr(drafts.interpreters, "available", lambda: ["3.6", "3.8", "3.9", "3.11"])
    releases = {
        "pytest": [("6.2.4", "2021-05-04"), ("7.4.4", "2023-12-31"), ("8.0.0", "2024-01-27")],
        "setuptools": [("56.0.0", "2021-04-08"), ("70.0.0", "2024-05-21")],
        "wheel": [("0.36.2", "2020-12-13"), ("9429", "")],
        "abacus": [("1.0", "2019-01-01"), ("1.5", "2021-01-01"), ("2.0rc1", "2021-02-01"), ("2.0", "2021-06-01")],
        "ledger": [("0.9", "2020-01-01"), ("1.0", "2021-04-01"), ("1.1", "2022-01-01")],
        "markers": [("1.0", "2020-01-01")],
    }
    return Shelf(tmp_path / "cache", releases, {"1.5": ">=3.9"})


def repository(tmp_path: Path, **content: str) -> str:
    names = {name.replace("__", "."): text for name, text in content.items()}
    return mirror(
        tmp_path / "mirror", "own/ledger", {**files(requires=("abacus<2", "markers; python_version<'3'")), **names}
    )


def test_a_draft_has_what_was_there_at_the_time(tmp_path: Path, shelf: Shelf) -> None:
    base = repository(tmp_path, setup__cfg="[options]\npython_requires = >=3.6,<3.9\n")
    row = instance(base_commit=base, created_at="2021-05-10T00:00:00Z")
    found = draft(row, mirror=tmp_path / "mirror", index=shelf)
    assert read_recipe(found.recipe.values()) == found.recipe, "it cannot be read back"
    assert found.recipe.source.kind == "git"
    assert found.recipe.python == "3.8", "the nearest to 3.8 that the project allows and the machine has"
    assert found.recipe.pins == ("pytest==6.2.4", "setuptools==56.0.0", "wheel==0.36.2", "abacus==1.0")
    assert found.recipe.install == ("python -m pip install -e .",)
    assert found.recipe.test_command == "pytest -rA test_ledger.py"
    assert any("read it before" in note for note in found.notes)


def test_without_a_mirror_the_last_archive_before_the_fix_is_taken(tmp_path: Path, shelf: Shelf) -> None:
    found = draft(instance(created_at="2021-05-10T00:00:00Z"), mirror=None, index=shelf)
    assert (found.recipe.source.name, found.recipe.source.version) == ("ledger", "1.0")
    assert found.recipe.source.sha256 == "a" * 64
    assert any("not the base commit" in note for note in found.notes)
    shelf._links["ledger"] = ()
    with pytest.raises(SourceMissing, match="--mirror DIR"):
        draft(instance(), mirror=tmp_path, index=shelf)


def test_a_specification_of_the_benchmark_comes_first(tmp_path: Path, shelf: Shelf) -> None:
    base = repository(tmp_path, requirements_test__txt="abacus<2  # for the tests\n-r other.txt\n")
    row = instance(base_commit=base, created_at="2021-05-10T00:00:00Z")
    spec = {
        "python": "3.5",
        "packages": "requirements.txt",
        "pip_packages": ["pytest==6.2.4", "abacus==1.0"],
        "pre_install": ["apt-get install -y libx", "sed -i 's/a/b/' setup.py"],
        "install": "pip install -e .[test]",
        "test_cmd": "pytest -rA -q",
    }
    found = draft(row, mirror=tmp_path / "mirror", index=shelf, specs={"own/ledger": {"1.0": spec}})
    assert found.recipe.python == "3.6" and any("3.5" in note for note in found.notes)
    assert found.recipe.pins == ("pytest==6.2.4", "abacus==1.0")
    assert found.recipe.install == ("sed -i 's/a/b/' setup.py", "pip install -e .[test]")
    assert any("libx" in note for note in found.notes)
    assert found.recipe.test_command == "pytest -rA -q test_ledger.py"
    listed = draft(
        row, mirror=None, index=shelf, specs={"own/ledger": {"1.0": spec | {"packages": "'abacus<2' pytest"}}}
    )
    assert listed.recipe.pins == ("pytest==6.2.4", "abacus==1.0")


def test_a_draft_has_one_pin_for_each_package(tmp_path: Path, shelf: Shelf) -> None:
    listed = "pytest==6.2.4\nPyTest>=5\nabacus[fast]>=1.5\ntypes-pkg_resources\nlate\n"
    base = repository(tmp_path, requirements_test__txt=listed)
    shelf._links["late"] = tuple(
        Link(f"late-{version}.tar.gz", "https://x", "a" * 64, "", None, f"2024-0{month}-01")
        for month, version in enumerate(("1.0", "2.0"), 1)
    )
    row = instance(base_commit=base, created_at="2021-05-10T00:00:00Z")
    found = draft(row, mirror=tmp_path / "mirror", index=shelf)
    # 1.5 of abacus does not run on this Python, so that no release is what both requirements ask for.
    assert found.recipe.python == "3.8"
    assert found.recipe.pins == (
        *("pytest==6.2.4", "setuptools==56.0.0", "wheel==0.36.2", "abacus[fast]==1.0", "late==1.0"),
    )
    notes = "\n".join(found.notes)
    assert "types-pkg_resources: the index has no release" in notes and "late: the index has no release of be" in notes
    spec = {"python": "3.9", "packages": "requirements.txt", "pip_packages": ["pytest==7.4.4", "wheel"], "test_cmd": ""}
    both = draft(row, mirror=tmp_path / "mirror", index=shelf, specs={"own/ledger": {"1.0": spec}})
    assert both.recipe.pins == ("pytest==7.4.4", "wheel==0.36.2", "abacus[fast]==1.5", "late==1.0")
    assert any("no release is what all of these ask for: <2 was taken" in note for note in found.notes)


@pytest.mark.parametrize(
    ("listed", "pin", "agree"),
    [
        ("a==1.0\na==1.0.0", "a==1.0", True),
        ("a==1.0\na==1.0+cpu", "a==1.0+cpu", True),
        ("a==1.0.0\na===1.0", "a===1.0", True),
        ("a===foo\na===Foo", "a===foo", True),
        ("a==1.0rc1\na>=0.9", "a==1.0rc1", True),
        ("a===foo\na>1", "a===foo", False),
        ("a==1.0\na==1.1", "a==1.0", False),
        ("a==1.0\na>2", "a==1.0", False),
    ],
)
def test_exact_versions_are_compared_as_versions_and_an_arbitrary_one_stays_so(
    tmp_path: Path, shelf: Shelf, listed: str, pin: str, agree: bool
) -> None:
    base = repository(tmp_path, requirements_test__txt=listed)
    row = instance(base_commit=base, created_at="2021-05-10T00:00:00Z")
    found = draft(row, mirror=tmp_path / "mirror", index=shelf)
    assert pin in found.recipe.pins
    assert any("no release is what all of these ask for" in note for note in found.notes) != agree


@pytest.mark.parametrize("specified", [True, False])
def test_tox_runs_the_tests_only_where_it_is_pinned_with_the_factor_of_the_python(
    tmp_path: Path, shelf: Shelf, monkeypatch: pytest.MonkeyPatch, specified: bool
) -> None:
    monkeypatch.setattr(drafts.interpreters, "available", lambda: ["3.6", "3.10"])
    command = "tox --current-env -epy39 -v --"
    monkeypatch.setattr(drafts, "default_command", lambda row: f"{command} test_ledger.py")
    specs = {"own/ledger": {"1.0": {"python": "3.9", "test_cmd": command, "pip_packages": ["tox", "tox-current-env"]}}}
    listed = "" if specified else "tox\ntox-current-env\n"
    row = instance(base_commit=repository(tmp_path, requirements_test__txt=listed), created_at="2022-05-10T00:00:00Z")
    for has in (True, False):
        for name in ("tox", "tox-current-env"):
            link = Link(f"{name}-4.0.tar.gz", "https://x", "a" * 64, "", None, "2021-01-01")
            shelf._links[name] = (link,) if has else ()
        found = draft(row, mirror=tmp_path / "mirror", index=shelf, specs=specs if specified else None)
        assert found.recipe.python == "3.10" and any("3.10 stands for 3.9" in note for note in found.notes)
        expected = "tox --current-env -epy310 -v -- test_ledger.py" if has else "pytest -rA test_ledger.py"
        assert found.recipe.test_command == expected
        assert ("tox==4.0" in found.recipe.pins) == has


def test_a_python_without_the_specifications_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"install swebench==4\.1\.0 there"):
        specifications(Path(sys.executable))
    with pytest.raises(InvalidRequest, match="none"):
        specifications(tmp_path / "none")


def test_the_command_adds_drafts_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    base = repository(tmp_path)
    dataset, _ = dump(
        tmp_path, [instance(base_commit=base), instance(instance_id="own__ledger-2", base_commit=base)], []
    )
    inputs = ["--dataset", str(dataset), "--mirror", str(tmp_path / "mirror"), "--store", str(tmp_path / "store")]
    assert main(["recipe", *inputs]) == 2 and "--instance" in capsys.readouterr().err
    assert main(["recipe", *inputs, "--instance", "own__ledger-1"]) == 0
    (recipe,) = json.loads(capsys.readouterr().out)
    assert recipe["source"] == {"kind": "git", "repo": "own/ledger"}
    target = str(tmp_path / "drafts.json")
    for name in ("own__ledger-1", "own__ledger-2", "own__ledger-1"):
        assert main(["recipe", *inputs, "--instance", name, "--output", target]) == 0
    assert sorted(load_recipes(Path(target))) == ["own__ledger-1", "own__ledger-2"]
