"""The family `boxes` as the subject of an ablation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Qwen3ForCausalLM

from errata_trainer.recipes.trl import environment_factory

from .boxes import Boxes
from .teachers import BoxTeachers
from .warmup import tokenizer_of

COPIES = 16
"""Copies of each task in the data set: TRL draws no row twice for one batch."""


class BoxesSubject:
    """The family as a `Subject` for `train`.

    Args:
        family: The tasks.
        policy: Directory of the taught policy.
        url: URL of a terminal that has the tasks.
    """

    def __init__(self, family: Boxes, policy: Path, url: str) -> None:
        self.family, self.policy, self.url = family, policy, url
        self.tokenizer = tokenizer_of(family)

    def trained(self, seed: int) -> dict[str, Any]:
        """Return a copy of the taught policy, its tasks and its environment; the seed is the trainer's."""
        del seed
        return {
            "model": self.model(),
            "processing_class": self.tokenizer,
            "train_dataset": Dataset.from_list(self.family.rows() * COPIES),
            "environment_factory": environment_factory(self.url, tools=["run"], task_columns=["task_id"]),
        }

    def model(self) -> Any:
        """Return a copy of the taught policy in float32."""
        return Qwen3ForCausalLM.from_pretrained(self.policy)

    def pairs(self, seed: int) -> BoxTeachers:
        """Return newly drawn teachers."""
        return BoxTeachers(self.family, seed)
