"""Precision for sums and differences of log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 or wider: half precision is too coarse for sums over many tokens and for
    differences."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
