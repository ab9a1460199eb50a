"""The family `boxes` as the subject of an ablation: its policy, and teachers that are often right; and the terminal
server of both families."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import Qwen3ForCausalLM

from errata_trainer.assembly.action_tokens import action_ids
from errata_trainer.assembly.batch import Transcripts
from errata_trainer.assembly.pair_source import PairSource, Referred
from errata_trainer.episodes.playing import Episode
from errata_trainer.recipes.trl import environment_factory
from errata_trainer.rollouts.rollout import DpoPair, Rollout
from errata_trainer.teachers import vote

from .boxes import KEYS, Boxes
from .projects import Project
from .serving import served
from .warmup import tokenizer_of

TASKS_VARIABLE = "ERRATA_TERMINAL_TASKS"
TEACHERS = 3
TEACHERS_RIGHT = 0.8
PAIRS_KEPT = 64
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


class BoxTeachers(PairSource):
    """Simulated teachers that vote. Each knows a box's key with a probability of 0.8 and never changes its answer.

    They take the place of models that know what the student does not. They are asked about failing turns. Answers are
    kept, so each teacher is asked once for each box.

    Args:
        family: The tasks.
        seed: Seed of the teachers' knowledge.
    """

    def __init__(self, family: Boxes, seed: int) -> None:
        self._family = family
        self._chance = random.Random(seed)
        self._answers: dict[str, list[str]] = {}
        self._pairs: deque[DpoPair] = deque(maxlen=PAIRS_KEPT)
        self._speak: Callable[[str], tuple[int, ...]] | None = None

    def use(self, tokenizer: Any, end_ids: Sequence[int], reference: str, **template: Any) -> None:
        """Set the tokenizer and the tokens with which an action is written as the student would write it."""
        del reference  # no pairs are kept between runs

        def speak(key: str) -> tuple[int, ...]:
            call = {"type": "function", "function": {"name": "run", "arguments": {"command": Boxes.command(key)}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            return action_ids(tokenizer, message, end_id=end_ids[0], **template)

        self._speak = speak

    def observe(self, rollouts: Sequence[Rollout], runners: Sequence[Episode | None], transcripts: Transcripts) -> None:
        """Ask the teachers about first turns that failed."""
        del transcripts
        for rollout, runner in zip(rollouts, runners, strict=True):
            first = rollout.turns[0] if rollout.turns and rollout.lost is None else None
            if runner is None or first is None or first.failed is None:
                continue
            box = str(runner.task["task_id"]).removeprefix("box-")
            command = first.failed.arguments.get("command")
            found = vote([Boxes.command(key) for key in self._asked(box)], command)
            assert self._speak is not None
            for pair in found.pairs:
                self._pairs.append(
                    DpoPair(
                        rollout.prompt_ids + rollout.completion_ids[: first.start],
                        self._speak(pair.chosen.removeprefix("./open ")),
                        rollout.completion_ids[first.start : first.stop],
                        weight=pair.weight,
                    )
                )

    def _asked(self, box: str) -> list[str]:
        if box not in self._answers:
            keys, right = KEYS[: self._family.keys], self._family.answers[box]
            self._answers[box] = [
                right if self._chance.random() < TEACHERS_RIGHT else self._chance.choice(keys) for _ in range(TEACHERS)
            ]
        return self._answers[box]

    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        """Return the newest pairs, each once."""
        return referred([self._pairs.pop() for _ in range(min(count, len(self._pairs)))])

    def metrics(self) -> dict[str, float]:
        """Return the number of questions to teachers and the number of pairs that wait."""
        return {"teacher_calls": float(TEACHERS * len(self._answers)), "pairs_kept": float(len(self._pairs))}


@contextmanager
def terminal_of(family: Boxes | Project, directory: Path) -> Iterator[str]:
    """Serve a terminal that has the family's tasks, and yield its URL.

    Args:
        family: The tasks.
        directory: Directory for the tasks and the server's data.
    """
    tasks = directory / "tasks"
    family.write(tasks)
    with served(
        "terminal",
        directory / "data",
        options=("--allow-unchecked",),
        environment={TASKS_VARIABLE: str(tasks.resolve())},
    ) as url:
        yield url
