"""Real instances of SWE-bench Lite, prepared once, graded on both backends: the same outcome of every test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from errata_sandboxd.images import main as image
from errata_server.sandbox.base_trees.tree import find_base
from swe_bench_lite_env.dataset import load_dataset
from swe_bench_lite_env.programs.cli import main
from swe_bench_lite_env.recipes import load_recipes
from swe_bench_lite_env.server.prepare.sources import build_key
from swe_bench_lite_env.server.prepare.store import Store
from tests.envs.swe.preparing import kept_place, python_or_skip, shared_data

from .conftest import RunningBroker

pytestmark = [pytest.mark.containers, pytest.mark.sandbox, pytest.mark.timeout(1200)]
NAMES = ("pallets__flask-4992", "pallets__flask-5063")
USELESS = """diff --git a/NOTES.txt b/NOTES.txt
new file mode 100644
--- /dev/null
+++ b/NOTES.txt
@@ -0,0 +1 @@
+nothing is repaired
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    found = main([*arguments, "--json"])
    shown = capsys.readouterr()
    assert found == 0, shown.out + shown.err
    return json.loads(shown.out)


@pytest.mark.parametrize("name", NAMES)
def test_gradings_have_the_outcomes_of_the_namespace_backend(
    name: str,
    engine: str,
    base_image: str,
    api: Any,
    broker: RunningBroker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = shared_data()
    python_or_skip("3.11")
    monkeypatch.setenv("ERRATA_SWE_STORE", str(kept_place() / "store"))
    monkeypatch.setenv("ERRATA_BASE_DIR", str(kept_place() / "bases"))
    monkeypatch.setenv("ERRATA_SANDBOXD_SOCKET", str(broker.sockets["two"]))
    files = ("--dataset", str(data / "swebench_lite_subset.jsonl"), "--recipes", str(data / "swe_recipes.json"))
    inputs = [*files, "--instance", name]
    run(capsys, "prepare", *inputs)
    reports: dict[tuple[str, str], Any] = {}
    rows = [json.loads(line) for line in (data / "swebench_lite_subset.jsonl").read_text().splitlines()]
    gold = next(row["patch"] for row in rows if row["instance_id"] == name)
    for backend in ("namespace", "docker"):
        monkeypatch.setenv("ERRATA_SANDBOX", backend)
        if backend == "docker":
            base = _base_of(files, name)
            if not api.images(name=f"errata/base:{base}"):
                assert image(["import", str(find_base(base).root), "--name", base, "--engine", engine, "-q"]) == 0
                capsys.readouterr()
        for what, patch in (("gold", gold), ("useless", USELESS)):
            predictions = tmp_path / f"{what}.jsonl"
            predictions.write_text(json.dumps({"instance_id": name, "model_name_or_path": what, "model_patch": patch}))
            found = run(capsys, "grade", *inputs, "--predictions", str(predictions), "--no-validate")
            reports[backend, what] = found["instances"][name]
    for what, resolved in (("gold", True), ("useless", False)):
        here, there = (reports[backend, what] for backend in ("namespace", "docker"))
        assert here["resolved"] is there["resolved"] is resolved
        for member in ("tests_status", "tampering", "reward"):
            assert here.get(member) == there.get(member), (what, member)
    statuses = reports["docker", "gold"]["tests_status"]
    assert statuses["FAIL_TO_PASS"]["success"] and not statuses["FAIL_TO_PASS"]["failure"]


def _base_of(files: tuple[str, ...], name: str) -> str:
    """Return the base tree of a prepared instance."""
    instance = next(one for one in load_dataset(files[1]) if one.instance_id == name)
    recipe = load_recipes(files[3])[name]
    build = Store().find(instance, build_key(instance, recipe))
    assert build is not None
    return build.base
