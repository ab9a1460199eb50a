"""What a session can read holds no fix: no copy of the project, no line of the gold patch."""

from __future__ import annotations

import gzip
import io
import py_compile
import runpy
import tarfile
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend, CommandResult, Limits
from errata_server.sandbox.base_trees.tree import find_base
from errata_server.sandbox.spec import File, SandboxSpec
from swe_bench_lite_env.dataset import Dataset, Instance
from swe_bench_lite_env.recipes import Recipe
from swe_bench_lite_env.server.offered import bundled
from swe_bench_lite_env.server.prepare import reach
from swe_bench_lite_env.server.prepare import store as store_module
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.reach import copies, fix_in_reach, project_packages, significant_lines
from swe_bench_lite_env.server.prepare.store import Build, Catalogue, Prepared, Store
from swe_bench_lite_env.server.prepare.validate import validate

from .preparing import TEST_PATCH, files, instance, recipe, write

SOURCE = """\
def total(entries, ignored=frozenset()):
    wanted = [entry.amount for entry in entries if entry.category not in ignored]
    return sum(amount for amount in wanted if amount is not None)
"""
GOLD = f"""\
diff --git a/ledger/__init__.py b/ledger/__init__.py
--- a/ledger/__init__.py
+++ b/ledger/__init__.py
@@ -1,5 +1,6 @@
-def total(entries):
-    return sum(entries[:-1])
{"".join(f"+{line}" for line in SOURCE.splitlines(keepends=True))}\
 
 
 def count(entries):
"""  # noqa: W293 - a diff has such lines
BUNDLED, RECIPES = bundled()


def test_significant_lines_are_long_enough_to_tell() -> None:
    assert list(significant_lines(GOLD)) == [line.strip() for line in SOURCE.splitlines()]
    common = "+        super().__init__(*args, **kwargs)\n+    rows.append(row)\n+    for row in rows:\n"
    assert list(significant_lines(common)) == []
    assert significant_lines('+raise ValueError("a view has no name of that kind")\n')


@pytest.mark.parametrize(
    "line",
    [
        "from typing import Any, Callable, Dict, Iterable, List, Optional",
        "from __future__ import absolute_import, division, print_function, unicode_literals",
        "    import numpy as np, pandas as pd, scipy as sp, matplotlib",
        ">>> from sympy import Symbol, Rational, simplify, integrate, expand",
        "    Any, Callable, Dict, Iterable, List, Optional, Union)",
    ],
)
def test_no_import_is_significant(line: str) -> None:
    assert significant_lines(f"+{line}\n") == {}


ISINSTANCE, ITEMS = "if isinstance(value, (list, tuple)):", "for key, value in kwargs.items():"
LONG = 'raise ValueError("the number of fields is not the one that was loaded from %s" % origin)'
SHORT, OTHER = "return self.origin.fields.get(name, missing)", "count = len(self.origin.loaded) - len(skipped)"
SITE = "/opt/env/lib/python3.9/site-packages"


@pytest.mark.parametrize(
    ("fix", "holds", "telling"),
    [
        ((ISINSTANCE,), {f"{SITE}/a/x.py": (ISINSTANCE,)}, ()),
        ((ISINSTANCE, SHORT), {f"{SITE}/a/x.py": (ISINSTANCE,)}, ()),
        (
            (LONG, SHORT, OTHER),
            {f"{SITE}/a/x.py": (SHORT, OTHER), "/y": (LONG,), "/z": (SHORT,)},
            (f"{SITE}/a/x.py", "/y"),
        ),
        ((LONG,), {f"{SITE}/{name}/x.py": (LONG,) for name in "ab"}, ()),
        ((LONG,), {f"{SITE}/a/x.py": (LONG,), f"{SITE}/b/_vendor/a/x.py": (LONG,)}, None),
        ((LONG,), {f"{SITE}/a/x.py": (LONG,), f"{SITE}/_a.py": (LONG,)}, None),
        ((LONG,), {f"{SITE}/a/x.py": (LONG,), "/usr/lib/python3.11/b.py": (LONG,)}, ()),
        ((LONG,), {"/opt/a/x.py": (LONG,), "/opt/b/x.py": (LONG,)}, None),
        ((LONG, SHORT), {f"{SITE}/{name}/x.py": (LONG, SHORT) for name in "ab"}, None),
        ((ISINSTANCE, ITEMS, SHORT), {f"{SITE}/{name}/x.py": (ISINSTANCE, ITEMS) for name in "ab"}, ()),
        ((LONG, SHORT, OTHER), {"/x.pyc": (LONG,), "/y.pyc": (SHORT, OTHER)}, ("/y.pyc",)),
    ],
)
def test_a_place_tells_where_its_lines_are_not_there_by_chance(
    fix: tuple[str, ...], holds: dict[str, tuple[str, ...]], telling: tuple[str, ...] | None
) -> None:
    search = runpy.run_path(str(reach._SEARCH))
    words = [frozenset(words) for words in significant_lines("".join(f"+{line}\n" for line in fix)).values()]
    assert len(words) == len(fix)
    found = [[place, [fix.index(line) for line in lines]] for place, lines in holds.items()]
    idioms = search["common_lines"](found, reach._SITES, [*reach._SITES, *reach._VENDORS])
    named = [place for place, has in found if search["tells"](place, has, words, len(fix), idioms)]
    assert named == list(holds if telling is None else telling)


class Printing:
    """A backend whose every command prints a text."""

    def __init__(self, text: str) -> None:
        self._text = text

    async def restore(self, snapshot: object, *, limits: Limits) -> Printing:
        assert limits.keep_bytes >= 64 * 1024**2
        return self

    async def run(self, command: str, **options: object) -> CommandResult:
        return CommandResult(0, self._text, "")

    async def destroy(self) -> None:
        pass


async def test_what_cannot_be_read_of_the_search_is_no_traceback() -> None:
    prepared = SimpleNamespace(
        instance=instance(patch=GOLD, test_patch=TEST_PATCH), workdir="/testbed", snapshot=None, python="python3"
    )
    with pytest.raises(EnvironmentFailed, match="cannot be read"):
        await fix_in_reach(Printing('[["/a", [0]], [ 4 bytes left out ]'), prepared)  # type: ignore[arg-type]


def packed(place: Path, *names: str) -> Path:
    with tarfile.open(place, "w:gz") as made:
        for name in names:
            made.addfile(tarfile.TarInfo(name), io.BytesIO())
    return place


@pytest.mark.parametrize(
    ("repo", "names", "packages"),
    [
        ("psf/requests", ["./requests/__init__.py", "./tests/__init__.py", "./setup.py"], {"requests"}),
        ("pytest-dev/pytest", ["./src/_pytest/__init__.py", "./src/pytest/__init__.py"], {"pytest", "_pytest"}),
        ("pytest-dev/pytest", ["./_pytest/__init__.py", "./pytest.py", "./conftest.py"], {"pytest", "_pytest"}),
        ("own/two-words", ["two_words.py", "other.py", "a/b/__init__.py"], {"two_words"}),
    ],
)
def test_the_packages_of_a_project_are_those_that_its_tree_imports(
    tmp_path: Path, repo: str, names: list[str], packages: set[str]
) -> None:
    assert project_packages(packed(tmp_path / "tree.tar.gz", *names), repo) == packages


def test_installed_vendored_and_archived_copies_are_found(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "usr/lib/python3/dist-packages/requests/__init__.py": "",
            "usr/lib/python3/dist-packages/__pycache__/requests.cpython-311.pyc": "",
            "opt/env/lib/python3.9/site-packages/pip/_vendor/requests/__init__.py": "",
            "opt/env/lib/python3.9/site-packages/other/packages/requests/api.py": "",
            "opt/env/lib/python3.9/site-packages/requests.py": "",
            "opt/env/lib/python3.9/site-packages/requests_mock/__init__.py": "",
            "opt/env/lib/python3.9/site-packages/sentry/integrations/requests/__init__.py": "",
        },
    )
    for name, member in (("pip-23-py3-none-any.whl", "pip/_vendor/requests/api.py"), ("x.zip", "x/requests.txt")):
        place = tmp_path / "opt/python/lib/python3.9/ensurepip/_bundled" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(place, "w") as made:
            made.writestr(member, "")
    assert copies(tmp_path, {"requests"}) == [
        "opt/env/lib/python3.9/site-packages/other/packages/requests",
        "opt/env/lib/python3.9/site-packages/pip",
        "opt/env/lib/python3.9/site-packages/requests.py",
        "opt/python/lib/python3.9/ensurepip/_bundled/pip-23-py3-none-any.whl",
        "usr/lib/python3/dist-packages/__pycache__/requests.cpython-311.pyc",
        "usr/lib/python3/dist-packages/requests",
    ]
    assert copies(tmp_path, {"ledger"}) == []


@pytest.fixture
def own(tmp_path: Path) -> tuple[Instance, Recipe]:
    write(tmp_path / "source", files())
    return instance(patch=GOLD, test_patch=TEST_PATCH), recipe(tmp_path)


def hidden_places(tmp_path: Path) -> dict[str, bytes]:
    """Return files with the fix in them, in the forms that a file may have."""
    lines = SOURCE.splitlines()
    (tmp_path / "fixed.py").write_text(SOURCE)
    py_compile.compile(str(tmp_path / "fixed.py"), str(tmp_path / "fixed.pyc"))
    inner, outer = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("ledger/__init__.py", SOURCE)
    with tarfile.open(fileobj=outer, mode="w:xz") as archive:
        member = tarfile.TarInfo("ledger.py")
        member.size = len(SOURCE)
        archive.addfile(member, io.BytesIO(SOURCE.encode()))
    return {
        "/home/agent/.cache/pip/http/0a": SOURCE.encode(),
        "/usr/share/doc/ledger/changes.rst": f"* total is now::\n\n {lines[1].strip()}\n {lines[2].strip()}\n".encode(),
        "/usr/share/doc/ledger/changes.gz": gzip.compress(SOURCE.encode()),
        "/opt/cache/ledger-1.1-py3-none-any.whl": inner.getvalue(),
        "/opt/cache/ledger-1.1.tar.xz": outer.getvalue(),
        "/opt/cache/__pycache__/ledger.cpython-311.pyc": (tmp_path / "fixed.pyc").read_bytes(),
        "/opt/cache/old/ledger.pyc": b"\0\0\0\0" + (tmp_path / "fixed.pyc").read_bytes()[4:],
        "/testbed/build/lib/ledger.orig": SOURCE.encode(),
    }


@pytest.mark.sandbox
async def test_the_fix_is_found_in_every_form_and_named_with_its_place(
    store: Store, namespace: Backend, own: tuple[Instance, Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = hidden_places(tmp_path)
    await Builder(store, namespace).build(*own)
    plain = SandboxSpec

    def planted(**values: object) -> SandboxSpec:
        more = [File(path, content) for path, content in places.items()]
        return plain(**{**values, "entries": (*values["entries"], *more)})  # type: ignore[arg-type, misc]

    catalogue = Catalogue(store, namespace)
    assert await fix_in_reach(namespace, await catalogue.find(*own, validated=False)) == []
    monkeypatch.setattr(store_module, "SandboxSpec", planted)
    catalogue = Catalogue(store, namespace)
    prepared = await catalogue.find(*own, validated=False)
    monkeypatch.setattr("swe_bench_lite_env.server.prepare.reach._SHOWN", 99)
    named = {line.split(" has ")[0].split("!")[0] for line in await fix_in_reach(namespace, prepared)}
    assert named == set(places)
    found = await validate(catalogue, *own, runs=1)
    assert not found.passed and not found.after, "its tests ran, although it cannot be served"
    assert found.problems[0].startswith("its sessions can read the fix: /")


@pytest.mark.sandbox
async def test_an_idiom_of_the_fix_in_a_thousand_files_is_no_fix(
    store: Store, namespace: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "source", files())
    patch = GOLD.replace("+def total", f"+    {ITEMS}\n+def total").replace("+1,6", "+1,7")
    own = instance(patch=patch, test_patch=TEST_PATCH), recipe(tmp_path)
    await Builder(store, namespace).build(*own)
    plain = SandboxSpec

    def planted(**values: object) -> SandboxSpec:
        more = [File(f"/opt/other/a_module_with_a_long_name_{n}.py", ITEMS.encode()) for n in range(1000)]
        return plain(**{**values, "entries": (*values["entries"], *more)})  # type: ignore[arg-type, misc]

    monkeypatch.setattr(store_module, "SandboxSpec", planted)
    prepared = await Catalogue(store, namespace).find(*own, validated=False)
    assert await fix_in_reach(namespace, prepared) == []


@pytest.mark.sandbox
@pytest.mark.parametrize("row", BUNDLED, ids=lambda row: row.instance_id)
async def test_no_line_of_a_bundled_fix_is_in_what_its_sessions_read(
    store: Store, namespace: Backend, row: Instance
) -> None:
    made = RECIPES.find(row.instance_id)
    await Builder(store, namespace).build(row, made)
    assert await fix_in_reach(namespace, await Catalogue(store, namespace).find(row, made, validated=False)) == []


@pytest.mark.sandbox
async def test_a_session_on_pytest_sees_no_other_pytest(
    store: Store, namespace: Backend, lite: Dataset, tmp_path: Path
) -> None:
    """The distribution's pytest 7.2.1 has the fix of this row, all of it."""
    row = lite.find("pytest-dev__pytest-8906")
    fixed = find_base().root / "usr/lib/python3/dist-packages/_pytest/python.py"
    lines = significant_lines(row.patch)
    assert all(line in fixed.read_text() for line in lines)
    tells = runpy.run_path(str(reach._SEARCH))["tells"]
    assert tells(str(fixed), list(range(len(lines))), list(map(set, lines.values())), len(lines), set())
    write(tmp_path / "source", {"src/_pytest/__init__.py": "", "src/pytest/__init__.py": "", "check.py": ""})
    made = recipe(tmp_path, instance_id=row.instance_id)
    bare = instance(instance_id=row.instance_id, repo=row.repo, patch="", test_patch="")
    build = await Builder(store, namespace).build(bare, made)
    assert any("dist-packages/_pytest" in note for note in build.notes)
    prepared = await Catalogue(store, namespace).find(bare, made, validated=False)
    searched = Prepared(**{**{name: getattr(prepared, name) for name in Prepared.__slots__}, "instance": row})
    assert await fix_in_reach(namespace, searched) == []
    sandbox = await namespace.restore(prepared.snapshot)
    seen = await sandbox.run(
        "find / -xdev -not -path '/testbed/*' -name '*pytest*' \\( -name '*.py' -o -name '_pytest' \\)"
    )
    imported = await sandbox.run("PYTHONPATH=src python3 -c 'import _pytest; print(_pytest.__file__)'")
    await sandbox.destroy()
    assert (seen.stdout, imported.stdout) == ("", "/testbed/src/_pytest/__init__.py\n")
    assert isinstance(build, Build)
