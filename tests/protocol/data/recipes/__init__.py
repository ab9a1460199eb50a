"""Recipes of the recorded outputs, one module per subject; their order gives the rows their ids."""

from __future__ import annotations

from . import (
    benign,
    builds,
    files,
    git,
    hard,
    limits,
    negatives,
    network,
    python_runs,
    shell,
    tests_run,
    wrong_arguments,
)
from .model import WHOLE, Recipe, Site, Span
from .trees import TREES

RECIPES: list[Recipe] = [
    recipe
    for subject in (
        tests_run,
        python_runs,
        builds,
        git,
        shell,
        files,
        wrong_arguments,
        limits,
        network,
        negatives,
        benign,
        hard,
    )
    for recipe in subject.RECIPES
]

__all__ = ["RECIPES", "TREES", "WHOLE", "Recipe", "Site", "Span"]
