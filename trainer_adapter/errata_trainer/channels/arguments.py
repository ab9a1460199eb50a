"""Argument checks with the same messages in every channel.

They read Python numbers and shapes only, so they never wait for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `schedules` needs no torch
    from torch import Tensor


def positive(name: str, value: float) -> None:
    """Raise ValueError unless a number is positive and finite.

    Args:
        name: Option name, for the message.
        value: Value to check.

    Raises:
        ValueError: It is 0, negative, infinite or NaN.
    """
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value}: it has to be positive and finite")


def not_negative(name: str, value: float) -> None:
    """Raise ValueError unless a number is finite and at least 0.

    Args:
        name: Option name, for the message.
        value: Value to check.

    Raises:
        ValueError: It is negative, infinite or NaN.
    """
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} is {value}: it has to be finite and not negative")


def upper_bound(name: str, value: float | None) -> None:
    """Raise ValueError unless an optional upper bound is None or positive.

    Args:
        name: Option name, for the message.
        value: Value to check; None and infinity are no bound.

    Raises:
        ValueError: It is 0, negative or NaN.
    """
    if value is not None and not value > 0.0:
        raise ValueError(f"{name} is {value}: it has to be positive, or None for no bound")


def shaped(name: str, tensor: Tensor | None, shape: tuple[int, ...], meaning: str) -> None:
    """Raise ValueError unless a tensor has the expected shape; another one might be broadcast without an error.

    Args:
        name: Argument name, for the message.
        tensor: Tensor to check; None passes.
        shape: Expected shape.
        meaning: The expected shape in the documentation's letters, e.g. ``[B, T]``.

    Raises:
        ValueError: It has another one.
    """
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}: it has to be {meaning}, here {list(shape)}")
