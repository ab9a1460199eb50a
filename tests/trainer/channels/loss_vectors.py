"""Reads the numbers of other implementations."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

DIRECTORY = Path(__file__).parents[2] / "golden" / "channels"


@cache
def vectors(name: str) -> dict[str, Any]:
    """Return the file."""
    return json.loads((DIRECTORY / f"{name}.json").read_text())


def tensor(values: Any, *, grad: bool = False) -> Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def close(name: str, actual: Tensor, expected: Any) -> None:
    """Compare at the file's own tolerance."""
    torch.testing.assert_close(actual, tensor(expected), **vectors(name)["tolerance"])
