"""Instances on images with the benchmark's names and layout: root's repository in /testbed, its history, conda."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from errata_sandboxd.images import main as image
from errata_server.sandbox.docker.backend import DockerBackend
from swe_bench_lite_env import SweBenchLiteEnv
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.programs.cli import main
from swe_bench_lite_env.recipes import load_recipes
from swe_bench_lite_env.server.prepare.images import image_recipes
from swe_bench_lite_env.server.prepare.store import Catalogue, NotPrepared, Store
from tests.client.loopback import served
from tests.envs.swe.preparing import files, git, instance, write
from tests.envs.swe.served import application

from .conftest import RunningBroker, remove_all, start_broker

pytestmark = [pytest.mark.containers, pytest.mark.sandbox, pytest.mark.timeout(1200)]

NAME = "swebench/sweb.eval.x86_64.own_1776_ledger-1:latest"
FIX = "    return sum(opening_balance(day) if entry is None else entry for day, entry in enumerate(entries))"
GOLD = f"""\
diff --git a/ledger/__init__.py b/ledger/__init__.py
--- a/ledger/__init__.py
+++ b/ledger/__init__.py
@@ -1,5 +1,9 @@
+def opening_balance(day):
+    return 0
+
+
 def total(entries):
-    return sum(entries[:-1])
+{FIX}
 
 
 def count(entries):
"""  # noqa: W293 - a diff has such lines
DOCKERFILE = f"""\
FROM errata/base:default
ARG NOTE=
RUN rm -rf /home/agent /workspace && sed -i /^agent:/d /etc/passwd
RUN python3 -m venv --without-pip --system-site-packages /opt/miniconda3/envs/testbed
WORKDIR /opt/miniconda3/envs/testbed/bin
RUN printf '#!%s/python\\nimport sys, pytest\\nsys.exit(pytest.console_main())\\n' "$PWD" > pytest
RUN chmod 755 pytest
RUN if [ "$NOTE" ]; then printf '%s\\n' "{FIX}" > /opt/notes.py; fi
COPY testbed /testbed
RUN touch /testbed/built.so && chmod -R go-w /testbed && git config --system --add safe.directory /testbed
"""


@dataclass
class Place:
    """What the tests share: a broker that allows the images, rows, and the commit of the fix."""

    broker: RunningBroker
    engine: str
    context: Path
    dataset: Path
    row: Instance
    fix: str

    def build(self, note: str) -> None:
        """Give the instance's name to an image; with a note, one that has the fix outside of /testbed."""
        options = ["--name", NAME, "--build-arg", f"NOTE={note}", "--engine", self.engine, "-q"]
        assert image(["build", str(self.context), *options]) == 0


@pytest.fixture(scope="module")
def place(engine: str, base_image: str, api: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("official")
    work = write(root / "context" / "testbed", files())
    git(work, "init", "--quiet")
    git(work, "add", "--all", "--force")
    git(work, "commit", "--quiet", "-m", "base")
    base = git(work, "rev-parse", "HEAD")
    (work / "fix.patch").write_text(GOLD)
    git(work, "apply", "fix.patch")
    (work / "fix.patch").unlink()
    git(work, "commit", "--quiet", "--all", "-m", "the fix")
    fix = git(work, "rev-parse", "HEAD")
    git(work, "tag", "v9.9")
    git(work, "branch", "later")
    git(work, "remote", "add", "origin", "https://example.com/own/ledger")
    git(work, "reset", "--quiet", "--hard", base)
    (root / "context" / "Dockerfile").write_text(DOCKERFILE)
    row = instance(base_commit=base, patch=GOLD)
    other = instance(instance_id="own__ledger-2", image_name="elsewhere/ledger")
    dataset = root / "rows.jsonl"
    dataset.write_text("".join(json.dumps(one.row() | {"image_name": one.image}) + "\n" for one in (row, other)))
    broker = start_broker(engine, root, "one", options=("--image", "errata/*", "--image", "swebench/*"))
    made = Place(broker, engine, root / "context", dataset, row, fix)
    made.build("")
    yield made
    broker.stop()
    remove_all(api, broker.owners["one"])
    api.remove_image(NAME, force=True)


@pytest.fixture
def prepare(
    place: Place, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> Any:
    """Runs ``errata swe prepare --images`` and returns its exit status and result."""
    monkeypatch.setenv("ERRATA_SANDBOX", "docker")
    monkeypatch.setenv("ERRATA_SANDBOXD_SOCKET", str(place.broker.sockets["one"]))
    monkeypatch.setenv("ERRATA_SWE_STORE", str(place.context.parent / "store"))

    def run(*arguments: str, row: str = "own__ledger-1") -> tuple[int, Any]:
        capsys.readouterr()
        inputs = ["--dataset", str(place.dataset), "--instance", row]
        status = main(["prepare", *inputs, "--images", *arguments, "--json"])
        shown = capsys.readouterr()
        assert shown.out, shown.err
        return status, json.loads(shown.out)["instances"][0]

    return run


LOOK = f"""
git log --all --format=%s; git remote; git tag; git reflog; ls -A .git/refs/heads
git cat-file -t THE_FIX 2>&1 | head -c 5; echo
stat -c %U . ledger ledger/__init__.py .git; find . -newermt '2026-01-01 00:00:02' | head; git status --short
which python pytest; echo $CONDA_DEFAULT_ENV $CONDA_PREFIX; cd && pwd; whoami; git config user.name
grep -rlF '{FIX.strip()}' / --exclude-dir=proc --exclude-dir=sys 2>/dev/null
"""
SEEN = """\
own/ledger at the base commit
main
fatal
agent
agent
agent
agent
/opt/miniconda3/envs/testbed/bin/python
/opt/miniconda3/envs/testbed/bin/pytest
testbed /opt/miniconda3/envs/testbed
/home/agent
agent
SWE-bench
"""


def test_an_image_is_prepared_by_name_served_forked_and_graded_after_a_restart(
    place: Place, prepare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, found = prepare()
    assert (status, found["validated"], found["problems"]) == (0, True, [])
    assert found["before"] == {"fail_to_pass": [0, 1], "pass_to_pass": [1, 1]}
    assert found["after"] == {"fail_to_pass": [1, 1], "pass_to_pass": [1, 1]}
    assert found["source"] == f"image {NAME}"
    monkeypatch.setenv("ERRATA_SWE_DATASET", str(place.dataset))
    monkeypatch.setenv("ERRATA_SWE_IMAGES", "swebench")
    with (
        served(application(tmp_path, sandbox="docker", deterministic=True)) as url,
        SweBenchLiteEnv(base_url=url).sync() as env,
    ):
        port = int(url.rpartition(":")[2])
        env.reset(instance_id="own__ledger-1")
        assert env.run(LOOK.replace("THE_FIX", place.fix)).observation.stdout == SEEN
        assert env.run("cd /testbed; echo x > x; rm x; python -c 'import ledger'").observation.exit_code == 0
        child = env.fork(2)
        end = child.submit()
        assert (end.done, end.reward) == (True, 0.0)
        child.close()
        assert env.apply_patch(GOLD).observation.error_kind is None
        ticket = env.ticket()
    with (
        served(application(tmp_path, sandbox="docker", deterministic=True), port=port) as url,
        SweBenchLiteEnv.resume(url, ticket).sync() as env,
    ):
        assert FIX.strip() in env.run("git diff").observation.stdout
        end = env.submit()
        assert (end.done, end.reward) == (True, 1.0)


def test_another_image_under_the_name_is_noticed_and_searched_for_the_fix(
    place: Place, prepare: Any, tmp_path: Path
) -> None:
    _, first = prepare("--no-validate")
    recipe = load_recipes(None, defaults=image_recipes([place.row], "swebench"))["own__ledger-1"]

    async def start() -> None:
        backend = DockerBackend(tmp_path / "sandboxes", place.broker.sockets["one"], spare=0)
        try:
            await Catalogue(Store(), backend).find(place.row, recipe, validated=False)
        finally:
            await backend.close()

    asyncio.run(start())
    place.build("with the fix")
    try:
        with pytest.raises(NotPrepared, match=r"now that of another image .*`errata swe prepare .*--images --instance"):
            asyncio.run(start())
        status, second = prepare()
    finally:
        place.build("")
    assert (status, second["base"] != first["base"]) == (1, True)
    assert "its sessions can read the fix: /opt/notes.py" in second["problems"][0]


def test_a_missing_image_and_one_that_is_not_allowed_name_the_command(prepare: Any) -> None:
    status, found = prepare("other:v2")
    assert status == 1 and "broker's list" in found["problems"][0]
    assert "--image 'other/sweb.eval.x86_64.own_1776_ledger-1:v2'" in found["problems"][0]
    status, found = prepare("swebench:v2")
    assert status == 1 and "errata image pull swebench/sweb.eval.x86_64.own_1776_ledger-1:v2" in found["problems"][0]
    status, found = prepare(row="own__ledger-2")
    assert status == 1 and "image elsewhere/ledger:latest is not on the broker's list" in found["problems"][0]
