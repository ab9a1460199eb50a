"""An extra brings what its recipe imports, and the recipe imports nothing more."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.hangs import HANGS_S

ROOT = Path(__file__).parents[2]
OURS = "openenv-errata"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PACKAGED = ("protocol", "client", "server", "envs", "trainer_adapter")
PROGRAM = """
import importlib, sys
paths, (recipe, *others) = sys.argv[1].split(":"), sys.argv[2:]
sys.path += paths
importlib.import_module(f"errata_trainer.recipes.{recipe}")
for other in others:
    try:
        importlib.import_module(f"errata_trainer.recipes.{other}")
    except ModuleNotFoundError as error:
        print(other, error.name.partition(".")[0])
"""


def closure(extra: str) -> set[str]:
    """Return the names of the distributions that an installation with one extra has."""
    found: set[tuple[str, str]] = set()
    waiting = [(OURS, ""), (OURS, extra)]
    while waiting:
        name, of = waiting.pop()
        if (name, of) not in found:
            found.add((name, of))
            waiting += [(canonicalize_name(one.name), more) for one in needed(name, of) for more in ("", *one.extras)]
    return {name for name, _ in found} - {OURS}


def needed(name: str, extra: str) -> Iterator[Requirement]:
    """Yield what a distribution needs with an extra, or without any."""
    if name == OURS:  # not as it was when it was installed
        lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    else:
        try:
            lines = importlib.metadata.requires(name) or ()
        except importlib.metadata.PackageNotFoundError:  # not for this system
            return
    for line in lines:
        one = Requirement(line)
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield one


def linked(names: set[str], place: Path) -> None:
    """Make a folder of packages that has some of the installed distributions, and no other."""
    entries: dict[str, set[tuple[str, Path]]] = defaultdict(set)
    for one in importlib.metadata.distributions():
        name, packages = canonicalize_name(one.name), Path(str(one.locate_file("")))
        for line in (one.read_text("RECORD") or "").splitlines():  # `files` would look for each of 100,000
            parts = line.partition(",")[0].strip('"').split("/")[:-1][:2] or [line.partition(",")[0]]
            if parts[0] not in ("..", "__pycache__"):
                entries[parts[0]].add((name, packages.joinpath(*parts)))
    for top, found in entries.items():
        owners = {name for name, _ in found}
        if owners <= names:
            source = next(iter(found))[1]
            (place / top).symlink_to(source if source.name == top else source.parent)
        elif owners & names:  # a namespace of several distributions
            (place / top).mkdir()
            for name, source in found:
                if name in names and source.name != top:
                    (place / top / source.name).symlink_to(source)


@pytest.mark.recipes
@pytest.mark.parametrize(
    ("extra", "others"),
    [("tinker", {"cartridge": "peft", "trl": "accelerate"}), ("cartridge", {"tinker": "tinker", "trl": "trl"})],
)
def test_a_recipe_imports_what_its_extra_brings(extra: str, others: dict[str, str], tmp_path: Path) -> None:
    linked(closure(extra), tmp_path)
    paths = ":".join(map(str, (tmp_path, *(ROOT / one for one in PACKAGED))))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", PROGRAM, paths, extra, *others],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert dict(line.split() for line in done.stdout.splitlines()) == others
