"""Environments are built in a sandbox, are shared by a version's instances, and hold no copy of the project."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from errata_protocol.errors import EnvironmentFailed
from errata_server.sandbox.base import Backend
from errata_server.sandbox.base_trees.derived import derive_base, remove_base
from errata_server.sandbox.base_trees.tree import find_base
from errata_server.sandbox.namespace.backend import NamespaceBackend
from swe_bench_lite_env.dataset import Instance
from swe_bench_lite_env.recipes import Recipe
from swe_bench_lite_env.server.prepare import interpreters
from swe_bench_lite_env.server.prepare.build import Builder
from swe_bench_lite_env.server.prepare.index import PackageIndex, Sources
from swe_bench_lite_env.server.prepare.sources import SourceMissing
from swe_bench_lite_env.server.prepare.store import Catalogue, Store
from swe_bench_lite_env.server.prepare.validate import validate

from .preparing import SETUP, files, instance, mirror, python_or_skip, recipe, simple_index, wheel, write

pytestmark = [pytest.mark.prepare, pytest.mark.sandbox]
OWN = f"3.{sys.version_info.minor}"
EDITABLE = "python setup.py develop"
"""Needs no package: the tests run without a network. `test_prepare_real` has pip's forms."""


@pytest.fixture(scope="module", autouse=True)
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Base trees of these tests lie apart from the user's own."""
    directory = tmp_path_factory.mktemp("bases")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ERRATA_BASE_DIR", str(directory))
        yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    directory = tmp_path_factory.mktemp("sandboxes")
    made = NamespaceBackend(directory)
    asyncio.run(made.start())
    yield made
    asyncio.run(made.close())
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """One for the module: its interpreter is copied once."""
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def builder(store: Store, backend: Backend, tmp_path: Path) -> Builder:
    wheels = [
        wheel(tmp_path, "abacus", version, {"abacus/__init__.py": f"VERSION = {version!r}\n"})
        for version in ("1.0", "2.0")
    ]
    url = simple_index(tmp_path / "index", {"abacus": wheels})
    index = PackageIndex(store.packages, Sources((url,)))
    return Builder(store, backend, mirror=tmp_path / "mirror", index=index)


def with_abacus(root: Path, **values: object) -> Recipe:
    record = {"python": OWN, "pins": ["abacus==1.0"], "install": [EDITABLE]}
    return recipe(root, **(record | {"test_command": "python check.py test_ledger"} | values))


async def shell(builder: Builder, row: Instance, made: Recipe, command: str) -> str:
    _, sandbox = await Catalogue(builder.store, builder.backend).open(row, made, validated=False)
    try:
        result = await sandbox.run(f"{{ {command}\n}} 2>&1")
        assert result.exit_code == 0, result.stdout
        return result.stdout
    finally:
        await sandbox.destroy()


async def test_two_instances_of_a_version_share_their_environment_read_only(builder: Builder, tmp_path: Path) -> None:
    write(tmp_path / "one", files("1.0.1", ("abacus",)))
    write(tmp_path / "two", files("1.0.2", ("abacus",)))
    pairs = []
    for number, name in enumerate(("one", "two"), 1):
        identity = f"own__ledger-{number}"
        source = {"kind": "directory", "path": name}
        pairs.append((instance(instance_id=identity), with_abacus(tmp_path, instance_id=identity, source=source)))
    builds = [await builder.build(*pair) for pair in pairs]
    assert builds[0].base == builds[1].base and builds[0].base.startswith(f"swe-own-ledger-py{OWN}-")
    catalogue = Catalogue(builder.store, builder.backend)
    for pair in pairs:
        found = await validate(catalogue, *pair, runs=1)
        assert found.passed, found.problems
    probe = (
        'python -c \'import importlib.metadata as m, ledger, abacus; print(m.version("ledger"), ledger.__file__, '
        "abacus.VERSION)'; which python; find /opt/env /opt/python -writable -not -type l | wc -l; "
        "ls /opt/env/lib/python*/site-packages | grep -ci ledger; git status --porcelain | wc -l; "
        "find /opt/env -name '*.pyc' | grep -c abacus; find / -xdev -name '*.pyc' 2>/dev/null | grep -c ledger"
    )
    for version, pair in zip(("1.0.1", "1.0.2"), pairs, strict=True):
        shown = await shell(builder, *pair, f"{probe}; true")
        assert shown.split() == [
            *(version, "/testbed/ledger/__init__.py", "1.0"),
            *("/opt/env/bin/python", "0", "1", "0", "1", "0"),
        ]


async def test_a_session_sees_no_vendored_copy_of_its_project(builder: Builder, tmp_path: Path) -> None:
    """pip has a copy of requests. It stays in the environment that further instances are installed with."""
    setup = "from setuptools import setup\nsetup(name='requests', version='1', packages=['requests'])\n"
    write(tmp_path / "source", {"requests/__init__.py": "", "setup.py": setup, "check.py": ""})
    environments = set()
    for number in (1, 2):
        names = {"instance_id": f"psf__requests-{number}"}
        row = instance(repo="psf/requests", patch="", test_patch="", **names)
        made = with_abacus(tmp_path, install=[EDITABLE, "python -m pip --version"], **names)
        build = await builder.build(row, made)
        environments.add(build.base)
        copies = "\\( -path '*requests*' -name '*.py*' -o -name 'pip-*.whl' -o -name pip -type d \\)"
        probe = f"find / -xdev {copies} -not -path '/testbed/*' 2>/dev/null; true"
        assert await shell(builder, row, made, probe) == ""
    assert len(environments) == 1


async def test_nothing_of_the_build_is_left(builder: Builder, tmp_path: Path) -> None:
    write(tmp_path / "source", files())
    row, made = instance(), with_abacus(tmp_path)
    await builder.build(row, made)
    probe = (
        "ls -A /tmp /var/tmp /home/agent /testbed; env; cat /proc/self/mountinfo; ls -d /setup /source /index || true"
    )
    shown = await shell(builder, row, made, probe)
    for word in ("build", "pip.conf", "index-url", ".pydistutils", "SETUPTOOLS", "SOURCE_DATE", "before.json"):
        assert word not in shown, word
    assert shown.count("No such file or directory") == 3


@pytest.mark.parametrize(
    "install",
    [
        pytest.param(["python setup.py install --single-version-externally-managed --record /dev/null"], id="copy"),
        pytest.param(["python setup.py install"], id="egg"),
        pytest.param(["python setup.py develop"], id="develop"),
    ],
)
async def test_an_installed_copy_is_replaced_with_the_work_tree(
    install: list[str], builder: Builder, tmp_path: Path
) -> None:
    write(tmp_path / "source", files(requires=("abacus",)))
    row, made = instance(), with_abacus(tmp_path, install=install)
    await builder.build(row, made)
    probe = (
        "cd /; python -c 'import importlib.metadata as m, ledger; print(ledger.__file__, m.version(\"ledger\"))'; "
        "grep -rl 'entries\\[:-1\\]' /opt /usr/lib/python3* /home /tmp /testbed || true"
    )
    shown = (await shell(builder, row, made, probe)).splitlines()
    assert shown[0] == "/testbed/ledger/__init__.py 1.0"
    assert shown[1:] == ["/testbed/ledger/__init__.py"], "another copy of the code"
    found = await validate(Catalogue(builder.store, builder.backend), row, made, runs=1)
    assert found.passed, found.problems


async def test_compiled_modules_stay_in_the_tree_and_out_of_git(builder: Builder, tmp_path: Path) -> None:
    extension = (
        "from setuptools import setup, Extension\n"
        "setup(name='ledger', version='1', packages=['ledger'], ext_modules=[Extension('ledger.fast', ['fast.c'])])\n"
    )
    code = (
        '#include <Python.h>\nstatic struct PyModuleDef m = {PyModuleDef_HEAD_INIT, "fast", 0, -1, 0};\n'
        "PyMODINIT_FUNC PyInit_fast(void) { return PyModule_Create(&m); }\n"
    )
    write(tmp_path / "source", {**files(), "setup.py": extension, "fast.c": code})
    row, made = instance(), with_abacus(tmp_path)
    await builder.build(row, made)
    probe = "cd /; python -c 'import ledger.fast as f; print(f.__file__)'; cd /testbed; git status --short; ls -d build"
    shown = (await shell(builder, row, made, f"{probe}; true")).splitlines()
    assert shown[0].startswith("/testbed/ledger/fast.cpython-") and "cannot access 'build'" in shown[1]


async def test_code_that_runs_at_the_installation_reaches_nothing_of_the_host(builder: Builder, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        probe = f"""
import os, socket, urllib.request
report = {{"uid": os.getuid(), "secret": os.environ.get("ERRATA_TOKEN")}}
report["home"] = os.path.exists({str(Path(__file__))!r})
for name, place in (("host", ("127.0.0.1", {port})),):
    try:
        socket.create_connection(place, 2)
        report[name] = "reached"
    except OSError as error:
        report[name] = type(error).__name__
report["index"] = urllib.request.urlopen("http://127.0.0.1:3141/simple/abacus/").status
try:
    open("/opt/python/bin/evil", "w")
except OSError as error:
    report["python"] = type(error).__name__
open("report.txt", "w").write(repr(report))
"""
        write(tmp_path / "source", {**files(), "setup.py": probe + SETUP.format(version="1.0", requires=[])})
        row, made = instance(), with_abacus(tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ERRATA_TOKEN", "secret")
            await builder.build(row, made)
        with pytest.raises(BlockingIOError):
            server.accept()
    report = eval(await shell(builder, row, made, "cat report.txt"))
    assert report == {
        "uid": 64000,
        "home": False,
        "secret": None,
        "host": "ConnectionRefusedError",
        "index": 200,
        "python": "PermissionError",
    }


async def test_what_fails_is_said_with_its_output(builder: Builder, tmp_path: Path) -> None:
    write(tmp_path / "source", files())
    row = instance()
    with pytest.raises(EnvironmentFailed, match=r"abacus==7(?s:.*)No matching distribution"):
        await builder.build(row, with_abacus(tmp_path, pins=["abacus==7"]))
    with pytest.raises(EnvironmentFailed, match=r"`echo why >&2; exit 9` of its recipe ended with 9: why"):
        await builder.build(row, with_abacus(tmp_path, install=["echo why >&2; exit 9"]))
    with pytest.raises(interpreters.InterpreterMissing, match=r"no Python 3\.99 .*pyenv install 3\.99.*ERRATA_PYTHONS"):
        await builder.build(row, with_abacus(tmp_path, python="3.99"))
    assert not list(builder.store.directory.glob(".build-*")), "a failed build left its directory"


async def test_an_environment_that_cannot_be_shared_is_made_anew(builder: Builder, tmp_path: Path) -> None:
    write(tmp_path / "source", files())
    first = (
        instance(),
        with_abacus(tmp_path, install=["test ! -e remove || pip uninstall -y abacus", EDITABLE], pins=[]),
    )
    first = first[0], replace(first[1], install=("pip install abacus==1.0", *first[1].install))
    one = await builder.build(*first)
    write(tmp_path / "source", {"remove": "yes\n"})
    two = await builder.build(*first)
    assert two.base != one.base and any("its own" in note for note in two.notes)
    assert "abacus" not in await shell(builder, *first, "ls /opt/env/lib/python*/site-packages")


PATH_FILE = """python -c "import site; open(site.getsitepackages()[0] + '/ledger.pth', 'w').write('/testbed')" """
"""What is left where an environment has no setuptools."""

VERSION_OF_GIT = """\
import os, subprocess
from setuptools import setup
said = os.environ.get("SETUPTOOLS_SCM_PRETEND_VERSION")
described = subprocess.run(["git", "describe", "--tags"], stdout=subprocess.PIPE).stdout.decode()
version = said or described.split("-")[0].lstrip("v") + ".dev" + described.split("-")[1]
setup(name="ledger", version=version, packages=["ledger"])
"""


@pytest.mark.parametrize(("tag", "version"), [("v0.8", "0.8.dev1"), ("", "1.0")])
async def test_a_version_that_is_made_of_git_is_right(tag: str, version: str, builder: Builder, tmp_path: Path) -> None:
    base = mirror(tmp_path / "mirror", "own/ledger", {**files(), "setup.py": VERSION_OF_GIT}, tag)
    row = instance(base_commit=base)
    made = with_abacus(tmp_path, source={"kind": "git"})
    await builder.build(row, made, again=True)  # the commit is the same with and without a tag
    shown = await shell(
        builder, row, made, "pip list --format=freeze | grep ledger; git tag; git describe --tags || true"
    )
    assert shown.splitlines()[0].startswith((f"ledger=={version}", "-e ", f"ledger @ {version}"))
    found = await validate(Catalogue(builder.store, builder.backend), row, made, runs=1)
    assert found.passed, found.problems


@pytest.mark.parametrize("version", ["3.6", "3.7", "3.8", "3.9", "3.10", "3.11", "3.12", "3.13"])
async def test_every_python_of_the_benchmark_builds_and_runs(version: str, builder: Builder, tmp_path: Path) -> None:
    minor = python_or_skip(version)
    name = f"py{minor.replace('.', '')}"
    base = mirror(tmp_path / "mirror", f"own__{name}", files(requires=("abacus",)))
    row = instance(base_commit=base, repo=f"own/{name}")
    old = int(minor[2:]) < 12
    made = with_abacus(
        tmp_path,
        source={"kind": "git"},
        python=minor,
        pins=["abacus==1.0"],
        install=[EDITABLE if old else PATH_FILE],
    )
    if minor == "3.6":  # its pip is replaced with the last for it, which the index of this test does not have
        builder.index.sources = replace(
            builder.index.sources, indexes=(*builder.index.sources.indexes, "https://pypi.org/simple")
        )
    build = await builder.build(row, made)
    assert build.interpreter.startswith(f"{minor}.")
    found = await validate(Catalogue(builder.store, builder.backend), row, made, runs=1)
    assert found.passed, found.problems
    command = "python -c 'import ssl, sqlite3, ctypes, abacus, ledger, sys; print(sys.prefix, ledger.__file__)'"
    assert await shell(builder, row, made, command) == "/opt/env /testbed/ledger/__init__.py\n"
    # As tox-current-env calls it: a link to the interpreter from elsewhere has the same packages.
    command = "ln -s $(which python) /tmp/python && /tmp/python -c 'import abacus, ledger; print(ledger.__file__)'"
    assert await shell(builder, row, made, command) == "/testbed/ledger/__init__.py\n"


async def test_a_root_file_system_gives_its_environment_and_its_code(
    builder: Builder, bases: Path, tmp_path: Path
) -> None:
    """As one of the benchmark's images: root's repository in /testbed with its history, and byte code beside it."""
    content = {**files(), "ledger/__pycache__/old.pyc": "x", "ledger.egg-info/PKG-INFO": "built", ".git/newer": "fix"}
    packed = tmp_path / "image.tar"
    with tarfile.open(packed, "w") as opened:
        opened.add(write(tmp_path / "code", content), "testbed")
        write(tmp_path / "packages", {"abacus_of_image.py": "VERSION = 9\n"})
        opened.add(tmp_path / "packages", "usr/lib/python3/dist-packages")
    image = await asyncio.to_thread(derive_base, find_base(), "image", [packed], directory=bases)
    try:
        row = instance()
        made = recipe(tmp_path, source={"kind": "tree", "path": str(image.root)}, python=OWN)
        build = await builder.build(row, made)
        assert build.python == "/usr/bin/python3"
        found = await validate(Catalogue(builder.store, builder.backend), row, made, runs=1)
        assert found.passed, found.problems
        probe = (
            "python3 -c 'import abacus_of_image as a; print(a.VERSION)'; git status --short;"
            " git ls-files | grep -c egg; ls ledger.egg-info; find / -xdev -name newer 2>/dev/null;"
            " touch ledger/x && echo mine; git log --oneline | wc -l"
        )
        assert (await shell(builder, row, made, probe)).split() == ["9", "0", "PKG-INFO", "mine", "1"]
        assert not [path for path in bases.iterdir() if "whole" in path.name and path.is_dir()]
        empty = recipe(tmp_path, source={"kind": "tree", "path": str(find_base().root)}, python=OWN)
        with pytest.raises(SourceMissing, match="has no /testbed"):
            await builder.build(row, empty)
    finally:
        await asyncio.to_thread(remove_base, image.id, bases)
