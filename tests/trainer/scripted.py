"""A policy that says what a script says; tool loop, masks, rewards, loss and optimizer are TRL's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from errata_trainer.tiny import END

Script = Callable[[int, int], str]
"""From a rollout's row in its batch and the number of its turn to what it says, without the end of turn."""


def call(name: str, **arguments: Any) -> str:
    """Return a turn that calls a tool."""
    return "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"


class Scripted:
    """Mixin for a trainer: `script` speaks in place of the model."""

    script: Script
    processing_class: Any

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        encode = self.processing_class.encode
        header = encode("<|im_start|>assistant\n", add_special_tokens=False)
        said = []
        first = getattr(self, "_said", None) is None or all(
            sum(ids[i : i + len(header)] == header for i in range(len(ids))) == 1 for ids in prompt_ids
        )
        if first:
            self._said = [list(ids) for ids in prompt_ids]
            rows = list(range(len(prompt_ids)))
        else:  # some rollouts have stopped: these are the ones that go on
            left = list(range(len(self._said)))
            rows = []
            for ids in prompt_ids:
                row = next(row for row in left if ids[: len(self._said[row])] == self._said[row])
                left.remove(row)
                rows.append(row)
        for row, ids in zip(rows, prompt_ids, strict=True):
            turn = sum(ids[i : i + len(header)] == header for i in range(len(ids))) - 1
            tokens = encode(self.script(row, turn) + END, add_special_tokens=False)
            self._said[row] = [*ids, *tokens]
            said.append(tokens)
        return said, None


def config(directory: Path, **changes: Any) -> Any:
    """Return a `GRPOConfig` for the CPU that writes nothing."""
    from trl import GRPOConfig

    given: dict[str, Any] = {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "learning_rate": 1e-4,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 512,
        "max_steps": 1,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "seed": 1,
    }
    return GRPOConfig(**{**given, **changes})
