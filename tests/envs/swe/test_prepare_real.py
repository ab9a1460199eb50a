"""Real rows of SWE-bench Lite from ``../shared/data``, prepared and validated by the command, from the package index.

The counts are those of a run by hand with the same recipes. Prepared instances stay in
the user's cache until what builds them changes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_server.sandbox.base_trees.tree import find_base
from swe_bench_lite_env.programs.cli import main
from tests.sandbox.as_user import REPOSITORY, UID, as_user

from .preparing import dump, files, git, instance, kept_place, mirror, python_or_skip, recipe, shared_data, write

pytestmark = [pytest.mark.prepare, pytest.mark.sandbox, pytest.mark.timeout(1800)]
COUNTS = {
    "pallets__flask-4992": ("3.11", 1, 18),
    "pallets__flask-5063": ("3.11", 2, 54),
    "pallets__flask-4045": ("3.9", 2, 50),
    "pytest-dev__pytest-8906": ("3.9", 1, 83),
    "mwaskom__seaborn-3010": ("3.9", 1, 2),
    "mwaskom__seaborn-3407": ("3.9", 1, 119),
}
"""Python, and how many tests of FAIL_TO_PASS and PASS_TO_PASS there are."""
ONE_RUN = ("mwaskom__seaborn-3407",)
"""Not three runs: each takes more than a minute."""
IN_ONE_STORE = ("pallets__flask-4992", "pallets__flask-5063")


@pytest.fixture(scope="module", autouse=True)
def kept() -> Iterator[None]:
    place = kept_place()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ERRATA_SWE_STORE", str(place / "store"))
        patch.setenv("ERRATA_BASE_DIR", str(place / "bases"))
        yield


def run(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    found = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert found == status, shown.out + shown.err
    return json.loads(shown.out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", COUNTS)
def test_a_real_instance_fails_empty_and_passes_with_gold(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = shared_data()
    version, repaired, kept = COUNTS[name]
    python_or_skip(version)
    inputs = ["--dataset", str(data / "swebench_lite_subset.jsonl"), "--recipes", str(data / "swe_recipes.json")]
    if name in ONE_RUN:
        run(capsys, "prepare", *inputs, "--instance", name, "--no-validate")
        (result,) = run(capsys, "validate", *inputs, "--instance", name, "--runs", "1")["instances"]
        assert result["validated"]
        assert result["after"] == {"fail_to_pass": [repaired, repaired], "pass_to_pass": [kept, kept]}
        assert result["before"] == {"fail_to_pass": [0, repaired], "pass_to_pass": [kept, kept]}
        return
    (result,) = run(capsys, "prepare", *inputs, "--instance", name)["instances"]
    assert (result["prepared"], result["validated"], result["problems"], result["flaky"]) == (True, True, [], [])
    assert result["before"] == {"fail_to_pass": [0, repaired], "pass_to_pass": [kept, kept]}
    assert result["after"] == {"fail_to_pass": [repaired, repaired], "pass_to_pass": [kept, kept]}
    assert result["runs"] in (1, 3) and result["rules"] == "5.0.2"  # 1: of an earlier run of this test, see below
    assert result["python"].startswith(f"{version}.")
    if name in IN_ONE_STORE:  # the result may be of an earlier run, since the store is kept
        (again,) = run(capsys, "validate", *inputs, "--instance", name, "--runs", "1")["instances"]
        assert (again["runs"], again["after"]) == (1, result["after"])


@pytest.mark.parametrize(
    ("python", "install", "pins"),
    [
        ("3.6", "pip install -e .", ["pytest==4.6.11"]),
        ("3.7", "pip install .", ["pytest==5.4.3"]),
        ("3.8", "pip install -e .", ["pytest==6.2.5"]),
        ("3.9", "pip install .", ["pytest==7.4.4"]),
        ("3.12", "pip install -e .", ["pytest==8.3.4"]),
        ("3.13", "pip install .", ["pytest==8.3.4"]),
    ],
)
def test_a_mirror_and_the_package_index_are_enough(
    python: str, install: str, pins: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    minor = python_or_skip(python)
    base = mirror(tmp_path / "mirror", "own__ledger", files())
    row = instance(base_commit=base, PASS_TO_PASS=["test_ledger.py::test_count"])
    made = recipe(
        tmp_path,
        source={"kind": "git"},
        python=minor,
        pins=pins,
        install=[install],
        test_command="pytest -rA test_ledger.py",
    )
    dataset, recipes = dump(tmp_path, [row], [made])
    inputs = ["--dataset", str(dataset), "--recipes", str(recipes)]
    (result,) = run(capsys, "prepare", *inputs, "--mirror", str(tmp_path / "mirror"))["instances"]
    assert result["after"] == {"fail_to_pass": [1, 1], "pass_to_pass": [1, 1]}
    (again,) = run(capsys, "validate", *inputs, "--runs", "1")["instances"]
    assert again["validated"] and again["runs"] == 1


@pytest.fixture
def user_home() -> Iterator[Path]:
    """A home for an ordinary user, outside of pytest's directory, where only root may go."""
    place = Path(tempfile.mkdtemp(prefix="errata-swe-"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's run of the other tests is rootless already")
def test_an_ordinary_user_prepares_real_instances(user_home: Path) -> None:
    data = shared_data()
    python_or_skip("3.11")
    for name in ("swebench_lite_subset.jsonl", "swe_recipes.json"):
        shutil.copyfile(data / name, user_home / name)
    place = REPOSITORY / f".cache/rootless/bases-{UID}"
    place.mkdir(parents=True, exist_ok=True)
    os.chown(place, UID, UID)
    source = find_base()
    if not (place / source.id / "base.json").exists():
        arguments = ["-m", "errata_server.cli", "base", "import", str(source.root.parent)]
        assert as_user(arguments, user_home, base_dir=place).returncode == 0
    program = "import sys; from swe_bench_lite_env.programs.cli import main; sys.exit(main(sys.argv[1:]))"
    inputs = ["--dataset", str(user_home / "swebench_lite_subset.jsonl")]
    inputs += ["--recipes", str(user_home / "swe_recipes.json"), "--store", str(user_home / "tmp/store")]
    arguments = ["-c", program, "prepare", *inputs, "--json", "--instance", *IN_ONE_STORE]
    done = as_user(arguments, user_home, base_dir=place, timeout_s=500.0)
    assert done.returncode == 0, done.stdout + done.stderr
    for result in json.loads(done.stdout)["instances"]:
        _, repaired, kept = COUNTS[result["instance_id"]]
        assert result["after"] == {"fail_to_pass": [repaired, repaired], "pass_to_pass": [kept, kept]}


def test_the_command_is_interrupted_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "source", files())
    dataset, recipes = dump(tmp_path, [instance()], [recipe(tmp_path)])
    program = Path(sys.executable).with_name("errata")
    command = [str(program), "swe", "prepare", "--dataset", str(dataset), "--recipes", str(recipes)]
    command += ["--store", str(tmp_path / "store")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "gold patch, run 1" not in process.stderr.readline():
        assert process.poll() is None
    process.kill()
    process.communicate()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "making the repository" not in done.stderr, "it was built again"
    assert done.stdout.startswith("ready  own__ledger-1: FAIL_TO_PASS 1/1, PASS_TO_PASS 1/1")


def test_wrong_input_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "source", files())
    rows = [instance(), instance(instance_id="own__ledger-2", split="test")]
    dataset, recipes = dump(tmp_path, rows, [recipe(tmp_path)])
    inputs = ["--dataset", str(dataset), "--recipes", str(recipes), "--store", str(tmp_path / "store")]
    assert main(["prepare", *inputs, "--instance", "own__ledger-2"]) == 2
    said = capsys.readouterr().err
    assert "has no recipe for own__ledger-2" in said and '"test_command"' in said and "errata swe recipe" in said
    assert main(["prepare", *inputs, "--instance", "own__ledger-3"]) == 2
    assert "no instance 'own__ledger-3'" in capsys.readouterr().err
    assert main(["validate", *inputs]) == 1
    assert "errata swe prepare" in capsys.readouterr().out
    assert main(["prepare", *inputs, "--disk-limit", "0"]) == 2
    assert "disk limit" in capsys.readouterr().err
    result = run(capsys, "prepare", *inputs)
    assert result["without_recipe"] == ["own__ledger-2"] and result["instances"][0]["validated"]
    assert main(["prepare", "--dataset", str(tmp_path / "none.jsonl"), "--recipes", str(recipes)]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["praise"]) == 2 and "prepare, validate" in capsys.readouterr().err
    assert main([]) == 2


def test_a_missing_interpreter_fails_one_instance_and_not_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "source", files())
    other = recipe(tmp_path, instance_id="own__ledger-2", python="3.99", pins=["pytest"])
    rows = [instance(instance_id="own__ledger-2"), instance()]
    dataset, recipes = dump(tmp_path, rows, [recipe(tmp_path), other])
    inputs = ["--dataset", str(dataset), "--recipes", str(recipes), "--store", str(tmp_path / "store")]
    first, second = run(capsys, "prepare", *inputs, status=1)["instances"]
    assert not first["prepared"] and "no Python 3.99 on this machine" in first["problems"][0]
    assert second["validated"]


def test_git_is_not_needed_on_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = mirror(tmp_path / "mirror", "own/ledger", files())
    git(tmp_path / "mirror" / "own/ledger", "cat-file", "-e", base)
    dataset, recipes = dump(tmp_path, [instance(base_commit=base)], [recipe(tmp_path, source={"kind": "git"})])
    inputs = ["--dataset", str(dataset), "--recipes", str(recipes), "--store", str(tmp_path / "store")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.defpath.replace("/usr/bin", "/nowhere").replace("/bin", "/nowhere"))
        (result,) = run(capsys, "prepare", *inputs, "--mirror", str(tmp_path / "mirror"))["instances"]
    assert result["validated"]
