"""Recipes of the recorded outputs, one module per subject; their order gives the rows their ids."""

from __future__ import annotations

from . import (
    benign,
    builds,
    files,
    git,
    hard,
    held_builds,
    held_python,
    held_quiet,
    held_shell,
    held_tests,
    limits,
    negatives,
    network,
    python_runs,
    shell,
    swe_turns,
    tests_run,
    wrong_arguments,
)
from .held_trees import HELD_TREES
from .model import WHOLE, Recipe, Site, Span
from .trees import TREES as FIRST_TREES

TREES = FIRST_TREES | HELD_TREES | swe_turns.TREES

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

HELD_RECIPES: list[Recipe] = [
    recipe for subject in (held_tests, held_python, held_builds, held_shell, held_quiet) for recipe in subject.RECIPES
]

CORPORA = {"outputs": ("own", RECIPES), "outputs2": ("held", HELD_RECIPES), "swe_turns": ("swe", swe_turns.RECIPES)}
"""Each recorded file by its stem: the prefix of its ids and its recipes."""

__all__ = ["CORPORA", "HELD_RECIPES", "RECIPES", "TREES", "WHOLE", "Recipe", "Site", "Span"]
