"""A package is imported without one of its modules, and nobody can tell who does not look for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_protocol.late_imports import import_without

INNER = """
try:
    from .pages import Pages, show
except ModuleNotFoundError:
    Pages = show = None
__all__ = ["Pages", "show"]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a package ``NAME.inner`` with a module ``pages``, whose names both packages export."""
    name = "late_outer"
    inner = tmp_path / name / "inner"
    inner.mkdir(parents=True)
    (tmp_path / name / "__init__.py").write_text(
        "from . import inner\nfrom .inner import *\ndef __getattr__(name):\n    return getattr(inner, name)\n"
    )
    (inner / "__init__.py").write_text(INNER)
    (inner / "pages.py").write_text("class Pages: pass\nclass show: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[module]


def test_the_module_is_imported_when_one_of_its_names_is_used(package: str) -> None:
    import_without(f"{package}.inner", "pages", ("Pages", "show"))
    inner = importlib.import_module(f"{package}.inner")
    assert f"{package}.inner.pages" not in sys.modules
    with pytest.raises(AttributeError, match=f"module '{package}.inner' has no attribute 'other'"):
        inner.other  # noqa: B018
    assert f"{package}.inner.pages" not in sys.modules
    assert inner.show is importlib.import_module(f"{package}.inner.pages").show
    assert vars(inner)["show"] is inner.show, "asked for once"


@pytest.mark.parametrize("where", ["", ".inner"])
def test_every_way_of_importing_finds_what_it_found(package: str, where: str) -> None:
    import_without(f"{package}.inner", "pages", ("Pages", "show"))
    found: dict[str, object] = {}
    exec(f"from {package}{where} import Pages", found)
    assert found["Pages"] is importlib.import_module(f"{package}.inner.pages").Pages


def test_all_names_are_exported_by_the_package_itself(package: str) -> None:
    import_without(f"{package}.inner", "pages", ("Pages", "show"))
    found: dict[str, object] = {}
    exec(f"from {package}.inner import *", found)
    assert {"Pages", "show"} <= found.keys() and None not in found.values()


def test_a_package_that_is_imported_already_stays_as_it_is(package: str) -> None:
    inner = importlib.import_module(f"{package}.inner")
    shown = inner.show
    import_without(f"{package}.inner", "pages", ("Pages", "show"))
    assert vars(inner)["show"] is shown and not hasattr(inner, "__getattr__")


def test_a_package_that_cannot_be_imported_leaves_nothing_behind(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "inner" / "__init__.py").write_text("raise OSError('no disk')")
    with pytest.raises(OSError, match="no disk"):
        import_without(f"{package}.inner", "pages", ("Pages", "show"))
    (tmp_path / package / "inner" / "__init__.py").write_text(INNER + "# now longer\n")
    importlib.invalidate_caches()
    assert importlib.import_module(f"{package}.inner").show is not None
