"""One rank of a training run on two, or all of it alone: `python ddp_main.py URL OUT RUN...` under torchrun or not.

Each run has a directory of its name in OUT. In ``plain`` and ``checkpointing`` all error sites are on the first rank
and all pairs on the second, which is where an uneven number of forward passes hangs. ``random`` has twenty steps in
which a seeded draw says what each row plays and which rows have pairs.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2]))
import conftest  # noqa: F401 # offline, one thread
import torch
from datasets import Dataset
from scripted import Scripted, call, config

from errata_trainer import DpoPair
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.trl import ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC

ROWS = [
    [call("read", path="green"), call("submit", word="owl"), "done"],
    [call("read", path="blue"), call("read", path="gray"), "I give up"],
    [call("submit", word="elk"), "done"],
    [call("read", path="green"), call("submit", word="elk"), "done"],
    [call("read", path="red"), call("submit", word="owl"), "done"],
    [call("submit", word="owl"), "done"],
    [call("submit", word="elk"), "done"],
    [call("submit", word="cat"), "done"],
]
WORLD, RANK = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
HERE = len(ROWS) // WORLD


class OfTheSecondHalf(PairSource):
    """Pairs of the rollouts that play in the second half of the rows."""

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        self.rollouts = [r for n, r in enumerate(rollouts) if n + RANK * HERE >= 4]

    def sample(self, count: int, referred: Callable[[Sequence[DpoPair]], list[DpoPair]]) -> list[DpoPair]:
        def first(rollout: Any) -> tuple[int, ...]:
            return tuple(rollout.completion_ids[rollout.turns[0].start : rollout.turns[0].stop])

        pairs = [DpoPair(r.prompt_ids, first(self.rollouts[0]), first(r)) for r in self.rollouts[1:]]
        return referred(pairs)


class Anywhere(PairSource):
    """Pairs of rollouts that a seeded draw names, by batch and row."""

    def __init__(self) -> None:
        self.batch = 0

    def use(self, tokenizer: Any, end_ids: Sequence[int], reference: str, **template: Any) -> None:
        self.chosen = tuple(tokenizer.encode(call("read", path="red") + END, add_special_tokens=False))

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        self.batch += 1
        self.pairs = []
        for n, r in enumerate(rollouts):
            own = r.completion_ids[r.turns[0].start : r.turns[0].stop]
            if random.Random(f"{self.batch} {n + RANK * HERE}").random() < 0.15 and own != self.chosen:
                self.pairs.append(DpoPair(r.prompt_ids, self.chosen, own))

    def sample(self, count: int, referred: Callable[[Sequence[DpoPair]], list[DpoPair]]) -> list[DpoPair]:
        return referred(self.pairs)


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    batches = 0
    had: list[tuple[bool, bool]]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        self.batches += 1
        batch = super()._generate_and_score_completions(inputs)
        self.had = [
            *getattr(self, "had", []), (any(batch.get("sdpo_items", ())), any(batch.get("dpo_pairs", ()))),
        ]  # fmt: skip
        return batch


def train(url: str, out: Path, run: str) -> None:
    """Train, and save the weights of each rank."""
    tokenizer = tiny_tokenizer([call("read", path="green"), "the word is owl no file"])
    rows = [{"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}] * 4
    changes = {"gradient_checkpointing": True} if run == "checkpointing" else {}
    anywhere = run == "random"
    trainer = Trainer(
        model=tiny_model(tokenizer),
        processing_class=tokenizer,
        args=config(
            out / f"run-{WORLD}-{RANK}",
            per_device_train_batch_size=HERE,
            num_generations=4,
            max_steps=20 if anywhere else 2,
            learning_rate=0.02 if anywhere else 0.1,
            optim="sgd",
            ddp_find_unused_parameters=False,
            **changes,
        ),
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment_factory(url, of_spec(SPEC)),
        alpha_sdpo=5.0,
        beta_replay=0.5,
        pairs=Anywhere() if anywhere else OfTheSecondHalf(),
    )

    def script(row: int, turn: int) -> str:
        n = row + RANK * HERE
        # Three of four rows make no mistake, so that a rank often has no site.
        drawn = random.Random(f"{trainer.batches} row {n}").choice([0, 1, 3, *[2, 4, 5, 6, 7] * 3]) if anywhere else n
        return ROWS[drawn][turn]

    trainer.script = script
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    weights = trainer.accelerator.unwrap_model(trainer.model).state_dict()
    torch.save({"weights": weights, "log": log, "had": trainer.had}, out / f"{WORLD}-{RANK}.pt")


if __name__ == "__main__":
    for name in sys.argv[3:]:
        train(sys.argv[1], Path(sys.argv[2]) / name, name)
