"""Batches with the channel losses that TRL's trainer had for them, in files that tests of other trainers read.

TRL and VeRL need different versions of transformers, so that no process can have both. A file names the weights of its
model by a formula: random ones differ between versions of torch and transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from scripted import call

from errata_trainer import DpoPair, Rollout, SdpoItem
from errata_trainer.rollouts.record_files import from_json, to_json
from errata_trainer.tiny import tiny_model, tiny_tokenizer

DIRECTORY = Path(__file__).parents[1] / "golden" / "verl"
TEXTS = (call("read", path="green"), "the word is owl no file", "Find it. One of red, green, blue holds a word.")

NEAR = 1e-5
"""How far a recorded number may be from one that is computed again, relative to the larger of it and 1; a gradient's,
relative to its norm. The model computes in float32, and the kernels of another CPU add up in another order: with others
(``ATEN_CPU_CAPABILITY=default``) losses are off by up to 3e-6, and the margins of pairs, which are differences of sums
over tokens, by 5e-6."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A batch and what TRL's trainer had for it.

    Attributes:
        options: Arguments of the trainer: weights and options of the channels, ``settings`` and ``temperature``.
        rollouts: Rollout of each row; a lost one has no sites.
        groups: Number of the group of each row.
        items: Error sites of each row.
        pairs: Pairs of each row, with the log-probabilities of a reference that has the initial weights.
        advantages: TRL's advantage of each row.
        results: TRL's losses and metrics of the step by name.
        gradient: What `measured` returns of the gradient of the channels' part of the loss.
    """

    options: dict[str, Any]
    rollouts: tuple[Rollout, ...]
    groups: tuple[int, ...]
    items: tuple[tuple[SdpoItem, ...], ...]
    pairs: tuple[tuple[DpoPair, ...], ...]
    advantages: tuple[float, ...]
    results: dict[str, float]
    gradient: dict[str, tuple[float, float]]

    def to_json(self) -> dict[str, Any]:
        """Return the batch as JSON values."""
        rows = [
            {
                "group": group,
                "rollout": to_json(rollout),
                "items": [to_json(item) for item in items],
                "pairs": [to_json(pair) for pair in pairs],
                "advantage": advantage,
            }
            for group, rollout, items, pairs, advantage in zip(
                self.groups, self.rollouts, self.items, self.pairs, self.advantages, strict=True
            )
        ]
        gradient = {name: list(values) for name, values in self.gradient.items()}
        return {"options": self.options, "rows": rows, "results": self.results, "gradient": gradient}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Recorded:
        """Return the batch of `to_json`'s values."""
        rows = given["rows"]
        return cls(
            given["options"],
            tuple(from_json(row["rollout"]) for row in rows),
            tuple(row["group"] for row in rows),
            tuple(tuple(map(from_json, row["items"])) for row in rows),
            tuple(tuple(map(from_json, row["pairs"])) for row in rows),
            tuple(row["advantage"] for row in rows),
            given["results"],
            {name: tuple(values) for name, values in given["gradient"].items()},
        )


def load(name: str) -> Recorded:
    """Return the batch of a file in `DIRECTORY`."""
    return Recorded.from_json(json.loads((DIRECTORY / f"{name}.json").read_text(encoding="utf-8")))


def text_of(recorded: Recorded) -> str:
    """Return the text of a batch's file, with a line for each row: the same text for the same batch."""

    def line(value: Any) -> str:
        return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"))

    given = recorded.to_json()
    rows = ",\n".join(map(line, given.pop("rows")))
    return line(given)[:-1] + f',"rows":[\n{rows}\n]}}\n'


def differences(found: Recorded, expected: Recorded) -> Iterator[str]:
    """Yield what differs between two batches, numbers that are `NEAR` each other excepted."""
    yield from gradient_differences(found.gradient, expected.gradient)
    yield from _differences(replace(found, gradient={}).to_json(), replace(expected, gradient={}).to_json())


def gradient_differences(
    found: Mapping[str, tuple[float, float]], expected: Mapping[str, tuple[float, float]], near: float = NEAR
) -> Iterator[str]:
    """Yield the parameters whose gradients differ, of those that `measured` returns.

    Args:
        found: Measures of one gradient.
        expected: Measures of the other.
        near: Distance that two measures may have, relative to the norm of the parameter's gradient.
    """
    if found.keys() != expected.keys():
        yield f"gradients of {sorted(found)}, recorded of {sorted(expected)}"
        return
    for name, values in expected.items():
        if max(abs(one - other) for one, other in zip(found[name], values, strict=True)) > near * values[0] + 1e-7:
            yield f"gradient of {name}: {found[name]!r}, recorded {values!r}"


def _differences(found: Any, expected: Any, at: str = "") -> Iterator[str]:
    """Yield what differs between JSON values."""
    if isinstance(found, dict) and isinstance(expected, dict) and found.keys() == expected.keys():
        for name in found:
            yield from _differences(found[name], expected[name], f"{at}/{name}")
    elif isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for n, (one, other) in enumerate(zip(found, expected, strict=True)):
            yield from _differences(one, other, f"{at}/{n}")
    elif isinstance(found, float) and isinstance(expected, float):
        if not math.isclose(found, expected, rel_tol=NEAR, abs_tol=NEAR):
            yield f"{at}: {found!r}, recorded {expected!r}"
    elif found != expected:
        yield f"{at}: {found!r}, recorded {expected!r}"


# The model


def tokenizer() -> Any:
    """Return the tokenizer of the recorded rollouts."""
    return tiny_tokenizer(TEXTS)


def initial() -> Any:
    """Return the model with the initial weights, those of the reference and of a teacher of its own."""
    return with_weights(tiny_model(tokenizer()), INITIAL)


def student() -> Any:
    """Return the model with the student's weights."""
    return with_weights(tiny_model(tokenizer()), STUDENT)


INITIAL, STUDENT = 0.0, 0.15
"""How far weights are moved away from the initial ones."""


def with_weights(model: Any, moved: float) -> Any:
    """Return a model after its weights were set by a formula."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            first, second = (direction(model, name, seed) for seed in (0, 1))
            # Matrices that large say something else of each token; a norm's weights are about 1.
            weight.copy_(1.0 + 0.1 * first if weight.dim() == 1 else 0.3 * first).add_(second, alpha=0.3 * moved)
    return model


def direction(model: Any, name: str, seed: int = 2) -> torch.Tensor:
    """Return a tensor of a parameter's shape with the sine of a function of the index of each element.

    Args:
        model: Model of the parameter.
        name: Name of the parameter; the sorted names number the parameters.
        seed: Number that gives another tensor.
    """
    names = [one for one, _ in model.named_parameters()]
    weight = model.get_parameter(name)
    index = torch.arange(weight.numel(), dtype=torch.float64)
    # The square makes a matrix of full rank; with the index alone it is the sum of two products of vectors.
    wave = torch.sin(0.5 * index.square() + 1.7 * index + sorted(names).index(name) + 0.37 * seed)
    return wave.view(weight.shape).float()


def measured(model: Any, gradients: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """Return the norm of each gradient, and its part along `direction`, which tells its sign and its places."""
    found = {}
    for name, gradient in gradients.items():
        wide, along = gradient.double(), direction(model, name).double()
        found[name] = (float(wide.norm()), float((wide * along).sum() / along.norm()))
    return found
