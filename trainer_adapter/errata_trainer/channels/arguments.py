"""Checks of options and tensors, with the same messages in every channel.

Only Python numbers and shapes are looked at: nothing here waits for a device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `schedules` needs no torch
    from torch import Tensor


def positive(name: str, value: float) -> None:
    """Refuse what is not positive and finite.

    Args:
        name: Of the option.
        value: Its value.

    Raises:
        ValueError: It is 0, negative, infinite or NaN.
    """
    if not 0.0 < value < math.inf:
        raise ValueError(f"{name} is {value}: it has to be positive and finite")


def not_negative(name: str, value: float) -> None:
    """Refuse what is not finite and at least 0.

    Args:
        name: Of the option.
        value: Its value.

    Raises:
        ValueError: It is negative, infinite or NaN.
    """
    if not 0.0 <= value < math.inf:
        raise ValueError(f"{name} is {value}: it has to be finite and not negative")


def upper_bound(name: str, value: float | None) -> None:
    """Refuse what bounds nothing that is positive.

    Args:
        name: Of the option.
        value: Its value; None and infinity are no bound.

    Raises:
        ValueError: It is 0, negative or NaN.
    """
    if value is not None and not value > 0.0:
        raise ValueError(f"{name} is {value}: it has to be positive, or None for no bound")


def shaped(name: str, tensor: Tensor | None, shape: tuple[int, ...], meaning: str) -> None:
    """Refuse a tensor of another shape, which would be broadcast to a number that means nothing.

    Args:
        name: Of the argument.
        tensor: What was given; None is not looked at.
        shape: What it has to be.
        meaning: The shape in the documentation's letters, e.g. ``[B, T]``.

    Raises:
        ValueError: It has another one.
    """
    if tensor is not None and tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}: it has to be {meaning}, here {list(shape)}")
