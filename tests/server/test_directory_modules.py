"""The modules of an environment's directory are its own, however they import each other and whatever else is there."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from errata_protocol.errors import InvalidRequest
from errata_server.targets.load import Servable, load, load_all

pytestmark = pytest.mark.usefixtures("forgotten")

MODELS = """
from openenv.core.env_server import Action, Environment, Observation, State

class Say(Action):
    text: str = ""

class Heard(Observation):
    text: str = ""

class Parrot(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Heard(text=self.ready())

    def step(self, action, timeout_s=None, **kwargs):
        return Heard(text=action.text)

    def ready(self):
        return "ready"

    @property
    def state(self):
        return State(episode_id="p", step_count=0)
"""
MAKE = 'app = create_app(Parrot, Say, Heard, env_name="parrot")\n'
OPENENV = "from openenv.core.env_server import create_app\n"
PROGRAM = f"{OPENENV}from models import Heard, Parrot, Say\n{MAKE}"
PACKAGE = f"{OPENENV}from ..models import Heard, Parrot, Say\n{MAKE}"


def write(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def written(directory: Path, app: str = PROGRAM, /, **files: str) -> str:
    """Write an environment; ``files`` are further ones, ``__`` standing for a separator and ``.py`` left out."""
    more = {f"{name.replace('__', '/')}.py": text for name, text in files.items()}
    return str(write(directory, {"server/app.py": app, "models.py": MODELS, **more}))


def reset(servable: Servable) -> str:
    return str(servable.factory().reset().text)  # type: ignore[attr-defined]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of installed packages."""
    found = tmp_path / "lib" / "site-packages"
    found.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(found))
    return found


@pytest.mark.parametrize("app", [PROGRAM, PACKAGE], ids=["program", "package"])
@pytest.mark.parametrize(
    "name", ["openenv", "fastapi", "errata_server", "terminal_env", "json", "calendar", "server", "class", "an env.2"]
)
def test_a_directory_can_have_any_name(name: str, app: str, tmp_path: Path) -> None:
    before = sys.modules.get(name)
    assert reset(load(written(tmp_path / name, app))) == "ready"
    assert name in ("server", "class", "an env.2") or sys.modules.get(name) is before


@pytest.mark.parametrize("init", [{}, {"server/__init__.py": ""}], ids=["folder", "package"])
@pytest.mark.parametrize("imported", [False, True])
def test_own_modules_come_before_installed_ones(
    init: dict[str, str], imported: bool, tmp_path: Path, site: Path
) -> None:
    nothing = {"server/__init__.py": "", "server/other.py": "", "models.py": "", "client/__init__.py": ""}
    write(site, nothing)
    if imported:
        for name in ("server", "models", "client"):
            importlib.import_module(name)
    app = f"import client\nimport server.names\nfrom server.names import READY\n{PROGRAM}assert server.names.READY\n"
    target = written(tmp_path / "birds", app, server__names="READY = 1\n", client="from models import Say\n")
    write(tmp_path / "birds", init)
    assert reset(load(target)) == "ready"


def test_an_installed_module_is_meant_where_the_own_one_has_not_what_is_imported(tmp_path: Path, site: Path) -> None:
    write(site, {"chess.py": "class Board: pass\n", "datasets/__init__.py": "def load(): return 1\n"})
    app = (
        "import datasets\nfrom datasets import load\nfrom chess import Board\nfrom ..chess import Game\n"
        f"assert datasets.load is load\n{PACKAGE}"
    )
    target = written(tmp_path / "birds", app, chess="import chess\nclass Game(chess.Board): pass\n")
    write(tmp_path / "birds", {"datasets/rows.csv": "1"})
    assert reset(load(target)) == "ready"


def test_packages_of_a_python_environment_in_the_directory_are_installed_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "birds" / ".venv" / "lib" / "site-packages"
    write(inside, {"feathers.py": "NAME = __name__\n"})
    monkeypatch.syspath_prepend(str(inside))
    assert reset(load(written(tmp_path / "birds", f"import feathers\nassert feathers.NAME == 'feathers'\n{PROGRAM}")))


LATE = MODELS.replace('return "ready"', "from names import READY\n        return READY")
ADDED = f"import os, sys\nsys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'parts'))\n{PROGRAM}"


@pytest.mark.parametrize("names", ["names.py", "parts/names.py"])
def test_two_directories_with_modules_of_the_same_names_are_served_together(names: str, tmp_path: Path) -> None:
    targets = []
    for number in ("first", "second"):
        app = ADDED.replace('"parrot"', f'"{number}"')
        targets.append(written(tmp_path / number / "birds", app))
        write(tmp_path / number / "birds", {"models.py": LATE, names: f"READY = '{number}'\n"})
    assert [reset(servable) for servable in load_all(targets)] == ["first", "second"]


def test_both_ways_of_import_get_the_same_module(tmp_path: Path) -> None:
    app = f"import birds.models\nimport models\nfrom .. import models as relative\n{PROGRAM}assert models is relative\n"
    app += "assert birds.models is models and Say is models.Say\n"
    assert load(written(tmp_path / "birds", app)).app is not None
    assert importlib.import_module("models") is sys.modules["birds.models"]
    assert importlib.import_module("server.app") is sys.modules["birds.server.app"]
    assert sys.modules["birds.models"].__spec__.name == "birds.models"  # type: ignore[union-attr]
    assert pickle.loads(b"cmodels\nSay\n.") is sys.modules["birds.models"].Say


def test_the_manifests_name_is_a_name_of_the_directory(tmp_path: Path) -> None:
    app = f"{OPENENV}from parrot.models import Heard, Parrot, Say\n{MAKE}"
    target = written(tmp_path / "a-clone", app)
    write(tmp_path / "a-clone", {"openenv.yaml": "name: parrot\napp: parrot.server.app:app\n"})
    assert reset(load(target)) == "ready"


def test_code_that_an_environment_runs_imports_what_is_installed(tmp_path: Path) -> None:
    ran = 'def ready(self):\n        exec("from names import READY", found := {})\n        return found["READY"]'
    models = MODELS.replace('def ready(self):\n        return "ready"', ran)
    target = written(tmp_path / "birds", names="READY = 'own'\n")
    write(tmp_path / "birds", {"models.py": models})
    servable = load(target)
    write(tmp_path / "work", {"names.py": "READY = 'the agent'\n"})
    sys.path.insert(0, str(tmp_path / "work"))
    assert reset(servable) == "the agent"


BARE = f"{OPENENV}from aviary.core import Heard, Parrot, Say\n{MAKE}"
MISSING = "import a_library_nobody_installed\n"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"server/app.py": BARE, "aviary/core.py": MISSING},
            r"No module named 'a_library_nobody_installed' \(.*aviary/core.py:1\)",
        ),
        (
            {"server/app.py": f"try:\n    from ..core import X\nexcept ImportError:\n    from core import X\n{PROGRAM}"}
            | {"core.py": MISSING},
            r"No module named 'a_library_nobody_installed' \(.*birds/core.py:1\)",
        ),
        (
            {"server/app.py": BARE},
            r"No module named 'aviary' \(.*; if a package is missing, install it with pip install",
        ),
        ({"server/app.py": BARE, "pyproject.toml": ""}, r"No module named 'aviary' .* pip install /.*/birds$"),
        ({"server/app.py": BARE, "server/requirements.txt": ""}, r"'aviary' .* pip install -r /.*/requirements.txt$"),
        ({"openenv.yaml": "app: aviary.server.app:app"}, r"No module named 'aviary'; if a package is missing"),
        ({"server/app.py": "from models import Bird\n"}, r"cannot import name 'Bird' from 'models' \(.*app.py:1\)$"),
        ({"server/app.py": "from server.absent import X\n"}, r"No module named 'server.absent' \(.*app.py:1\)"),
        ({"server/app.py": "from .absent import X\n"}, r"No module named 'server.absent' \(.*app.py:1\)"),
        (
            {"__init__.py": MISSING + "X = 1\n", "server/app.py": "from .. import X\n"},
            r"cannot import name 'X' .*; its __init__.py raised ModuleNotFoundError: .*'a_library_nobody_installed'",
        ),
        ({"server/app.py": "raise SystemExit('no key')\n"}, r"SystemExit: no key \(.*app.py:1\)$"),
    ],
)
@pytest.mark.parametrize("name", ["birds", "openenv"])
def test_the_error_of_an_import_is_the_real_one(files: dict[str, str], message: str, name: str, tmp_path: Path) -> None:
    target = str(write(Path(written(tmp_path / name)), files))
    with pytest.raises(InvalidRequest) as caught:
        load(target)
    assert re.search(message.replace("birds", name), caught.value.message)
    assert "\n" not in caught.value.message


def test_a_src_layout_that_is_not_installed_is_served(tmp_path: Path) -> None:
    write(
        tmp_path / "birds",
        {
            "openenv.yaml": "name: parrot\napp: aviary.server.app:app\n",
            "src/aviary/__init__.py": "",
            "src/aviary/server/app.py": BARE,
            "src/aviary/core.py": MODELS,
        },
    )
    assert reset(load(str(tmp_path / "birds"))) == "ready"
