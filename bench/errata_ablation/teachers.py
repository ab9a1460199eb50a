"""Simulated teachers of both families, which take the place of models that know what the student does not.

They need no trainer: the ablation trains with TRL, bench/verl_learning.py with VeRL.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from errata_trainer.assembly.action_tokens import action_ids
from errata_trainer.assembly.batch import Transcripts
from errata_trainer.assembly.pair_source import PairSource, Referred
from errata_trainer.episodes.playing import Episode
from errata_trainer.rollouts.rollout import DpoPair, Rollout
from errata_trainer.teachers import vote

from .boxes import KEYS, Boxes
from .projects import VALUES, Project

TEACHERS = 3
TEACHERS_RIGHT = 0.8
PAIRS_KEPT = 64


class SimulatedTeachers(PairSource):
    """Teachers that vote on failing turns. Each knows an answer with a probability of 0.8 and never changes it.

    Args:
        seed: Seed of the teachers' knowledge.
        at_random: They know nothing: all agree on an answer that is drawn.
    """

    def __init__(self, seed: int, *, at_random: bool = False) -> None:
        self._at_random = at_random
        self._chance = random.Random(seed)
        self._answers: dict[str, list[str]] = {}
        self._pairs: deque[DpoPair] = deque(maxlen=PAIRS_KEPT)
        self._speak: Callable[[str], tuple[int, ...]] | None = None

    @abstractmethod
    def commands(self, task_id: str, turn: int) -> Sequence[str]:
        """Return the command of each teacher in the place of a turn; none if they are not asked about it.

        Args:
            task_id: Id of the task.
            turn: Index of the turn.
        """

    def asked(self, question: str, right: str, values: Sequence[str]) -> list[str]:
        """Return the answer of each teacher to a question, the same each time.

        Args:
            question: The question.
            right: Right answer to the question.
            values: The answers that there are.
        """
        if question not in self._answers:
            if self._at_random:
                self._answers[question] = [self._chance.choice(values)] * TEACHERS
            else:
                self._answers[question] = [
                    right if self._chance.random() < TEACHERS_RIGHT else self._chance.choice(values)
                    for _ in range(TEACHERS)
                ]
        return self._answers[question]

    def use(self, tokenizer: Any, end_ids: Sequence[int], reference: str, **template: Any) -> None:
        """Set the tokenizer and the tokens with which an action is written as the student would write it."""
        del reference  # no pairs are kept between runs

        def speak(command: str) -> tuple[int, ...]:
            call = {"type": "function", "function": {"name": "run", "arguments": {"command": command}}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            return action_ids(tokenizer, message, end_id=end_ids[0], **template)

        self._speak = speak

    def observe(self, rollouts: Sequence[Rollout], runners: Sequence[Episode | None], transcripts: Transcripts) -> None:
        """Ask the teachers about turns that failed."""
        del transcripts
        if self._speak is None:
            raise RuntimeError("teachers are asked before they know the student's format")
        for rollout, runner in zip(rollouts, runners, strict=True):
            if runner is None or rollout.lost is not None:
                continue
            for turn in rollout.turns:
                if turn.failed is None:
                    continue
                commands = self.commands(str(runner.task["task_id"]), turn.index)
                for pair in vote(commands, turn.failed.arguments.get("command")).pairs if commands else ():
                    context = rollout.prompt_ids + rollout.completion_ids[: turn.start]
                    own = rollout.completion_ids[turn.start : turn.stop]
                    self._pairs.append(DpoPair(context, self._speak(pair.chosen), own, weight=pair.weight))

    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        """Return the newest pairs, each once."""
        return referred([self._pairs.pop() for _ in range(min(count, len(self._pairs)))])

    def metrics(self) -> dict[str, float]:
        """Return the number of questions to teachers and the number of pairs that wait."""
        return {"teacher_calls": float(TEACHERS * len(self._answers)), "pairs_kept": float(len(self._pairs))}


class BoxTeachers(SimulatedTeachers):
    """Teachers who know the keys of boxes, and are asked about first turns.

    Args:
        family: The tasks.
        seed: Seed of the teachers' knowledge.
    """

    def __init__(self, family: Boxes, seed: int) -> None:
        super().__init__(seed)
        self._family = family

    def commands(self, task_id: str, turn: int) -> Sequence[str]:
        """Return the command of each teacher in the place of a first turn."""
        if turn > 0:
            return ()
        box = task_id.removeprefix("box-")
        keys = self.asked(box, self._family.answers[box], KEYS[: self._family.keys])
        return [Boxes.command(key) for key in keys]


class StepTeachers(SimulatedTeachers):
    """Teachers who know the values of a project's operations.

    Args:
        project: The tasks.
        seed: Seed of the teachers' knowledge.
        at_random: They know nothing: all agree on a value that is drawn for each operation.
    """

    def __init__(self, project: Project, seed: int, *, at_random: bool = False) -> None:
        super().__init__(seed, at_random=at_random)
        self._project = project

    def commands(self, task_id: str, turn: int) -> Sequence[str]:
        """Return the command of each teacher for the step of a turn."""
        steps = self._project.task(task_id).steps
        if turn >= len(steps):
            return ()
        step = steps[turn]
        right = self._project.conventions[step.operation]
        return [step.command(value) for value in self.asked(step.operation, right, VALUES)]
