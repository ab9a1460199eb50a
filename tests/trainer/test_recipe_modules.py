"""A recipe holds what knows its trainer, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import errata_trainer

PACKAGE = Path(errata_trainer.__file__).parent
RECIPE = PACKAGE / "recipes" / "trl"
OF_TRL = ("trl", "transformers", "accelerate")

BY_SHAPE = {
    "environment": "the class that TRL's environment_factory takes: public methods are tools",
    "parallel_tools": "a mixin over private methods of TRL's trainer",
    "refusals": "options of TRL's trainer and state of its accelerator",
    "dataset": "rows in the format of TRL's train_dataset",
}
"""Modules that know TRL without importing it, with what they know."""


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module)
    return found


def test_each_module_of_the_recipe_knows_trl() -> None:
    names = {path.stem for path in RECIPE.glob("*.py")} - {"__init__"}
    assert BY_SHAPE.keys() <= names
    for name in names - BY_SHAPE.keys():
        known = [module for module in imported(RECIPE / f"{name}.py") if module.split(".")[0] in OF_TRL]
        assert known, f"{name} imports nothing of TRL: it belongs beside sites.py, for other recipes"


def test_nothing_experimental_of_trl_is_imported() -> None:
    # The ablation compares with TRL's own SDPO trainer, which is experimental.
    for path in PACKAGE.rglob("*.py"):
        if "ablation" not in path.parts:
            assert not any(module.startswith("trl.experimental") for module in imported(path)), path
