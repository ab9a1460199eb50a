"""Metrics of a training step that do not depend on how the batch is split into micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["mean", "step", "batch", "running", "share"]
Taken = dict[str, tuple[Kind, tuple[float, float]]]
"""What one process recorded, by name: the kind, the sum of values and that of weights. It can be pickled, and JSON can
keep it: `combined` takes lists for tuples."""

Gather = Callable[[Any], list[Any]]
"""Returns an object of every rank, in order of rank, on every rank: e.g. `torch.distributed.all_gather_object`."""


OUTCOMES = (
    "kept",
    "not_better",
    "no_hint",
    "other_key",
    "too_long",
    "not_rendered",
    "no_targets",
    "not_spliced",
    "beyond_max_sites",
    "row_not_trained",
    "not_sampled",
)
"""What becomes of failing turns, each counted once; those that are ``not_sampled`` are also ``kept``."""


class Metrics:
    """Collects values on one rank and combines them over ranks when they are read: by `read` where ranks can gather,
    by `take` and `combined` where something else carries what they took, e.g. as the result of a remote call.

    Values are floats or 0-d tensors without gradient. Tensors are read when the metrics are, not before, so recording
    does not wait for a device.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, Kind] = {}
        self._values: dict[str, list[tuple[Any, Any]]] = {}

    def mean(self, name: str, total: Any, weight: Any = 1.0) -> None:
        """Record one part of a mean: sum of all ``total`` divided by sum of all ``weight``."""
        self._record("mean", name, total, weight)

    def step(self, name: str, value: Any) -> None:
        """Record one part of a sum over an optimizer step. It is summed over micro-batches and ranks, and averaged over
        steps."""
        self._record("step", name, value)

    def batch(self, name: str, value: Any) -> None:
        """Record a count of a generation batch. It is summed over ranks, and averaged over batches."""
        self._record("batch", name, value)

    def running(self, name: str, value: Any) -> None:
        """Record a running count. The latest value of each rank is summed over ranks; it is never cleared."""
        self._values[name] = []
        self._record("running", name, value)

    def share(self, group: str, name: str, value: Any) -> None:
        """Record one part of a share: ``group/name`` is the sum for ``name`` divided by the sum over the group."""
        self._record("share", f"{group}/{name}", value)

    def _record(self, kind: Kind, name: str, value: Any, weight: Any = 1.0) -> None:
        if self._kinds.setdefault(name, kind) != kind:
            raise ValueError(f"{name} was recorded as {self._kinds[name]}, now as {kind}")
        self._values.setdefault(name, []).append((value, weight))

    def take(self) -> Taken:
        """Return what this process recorded since the last call, for `combined`, and forget it but for running counts.

        No other process takes part.
        """
        numbers = _numbers(self._values)
        own: Taken = {name: (self._kinds[name], _sums(self._kinds[name], values)) for name, values in numbers.items()}
        self._values = {name: values for name, values in self._values.items() if self._kinds[name] == "running"}
        return own

    def read(self, steps: int, gather: Gather) -> dict[str, float]:
        """Return the metrics of all ranks since the last call, `combined` from what each took. All have to call it.

        Args:
            steps: Optimizer steps since the last call, at least 1.
            gather: Returns an object of every rank, on every rank.
        """
        return combined(gather(self.take()), steps)


def combined(taken: Iterable[Taken], steps: int) -> dict[str, float]:
    """Return the metrics of all processes.

    Args:
        taken: Sums of each process over the same steps; see `Metrics.take`.
        steps: Optimizer steps that they were recorded in, at least 1.
    """
    kinds: dict[str, Kind] = {}
    sums: dict[str, list[float]] = {}
    for rank in taken:
        for name, (kind, (total, weight)) in rank.items():
            kinds[name] = kind
            both = sums.setdefault(name, [0.0, 0.0])
            both[0] += total
            both[1] += weight
    return dict(_read(kinds, sums, steps))


def _sums(kind: Kind, values: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return the sums of values and of weights; of batches the mean of a rank, which ranks then add up."""
    pairs = list(values)
    total, weight = sum(value for value, _ in pairs), sum(weight for _, weight in pairs)
    return (total / max(1, len(pairs)), 1.0) if kind == "batch" else (total, weight)


def _numbers(values: Mapping[str, Sequence[tuple[Any, Any]]]) -> dict[str, list[tuple[float, float]]]:
    """Return values and weights as numbers; all tensors of a device are read in one message."""
    flat = [one for of_name in values.values() for pair in of_name for one in pair]
    devices: dict[Any, list[int]] = {}
    for n, one in enumerate(flat):
        if hasattr(one, "device"):
            devices.setdefault(one.device, []).append(n)
    for places in devices.values():
        import torch  # tensors were recorded, so it is installed

        read = torch.stack([flat[n].detach().to(torch.float64).reshape(()) for n in places]).tolist()
        for n, number in zip(places, read, strict=True):
            flat[n] = number
    numbers = iter(float(one) for one in flat)
    return {name: [(next(numbers), next(numbers)) for _ in of_name] for name, of_name in values.items()}


def _read(kinds: Mapping[str, Kind], sums: Mapping[str, list[float]], steps: int) -> Iterable[tuple[str, float]]:
    wholes: dict[str, float] = {}
    for name, (total, _) in sums.items():
        if kinds[name] == "share":
            group = name.rsplit("/", 1)[0]
            wholes[group] = wholes.get(group, 0.0) + total
    for name in sorted(sums):
        total, weight = sums[name]
        if kinds[name] == "mean":
            if weight:
                yield name, total / weight
        elif kinds[name] == "step":
            yield name, total / max(1, steps)
        elif kinds[name] == "share":
            whole = wholes[name.rsplit("/", 1)[0]]
            yield name, total / whole if whole else 0.0
        else:
            yield name, total
