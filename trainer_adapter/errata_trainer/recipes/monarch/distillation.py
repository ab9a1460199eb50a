"""The teacher of channel 2 in a process of its own: the forward pass with the hint is made there.

The trainer sends the error sites and gets the likeliest tokens at each position, and sends the student's weights after
each optimizer step, which the teacher follows as an exponential moving average.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from monarch.actor import HostMesh, concurrent_endpoint, endpoint, this_proc
from torch import Tensor

from ...assembly.channel_set import ChannelSet
from ...assembly.listed import ListedDistillation, TokenLists
from ...assembly.teacher_weights import TeacherCopy
from ...channels.distil import project
from ...channels.forward import frozen_states
from ...channels.heads import output_head
from ...channels.sdpo import log_probabilities
from ...rollouts.rollout import SdpoItem
from .supervision import Lost, Supervisor, WorkerActor

__all__ = ["MakeModel", "SDPOTeacher", "SDPOTeacherActor"]

log = logging.getLogger("errata.trainer")

MakeModel = Callable[[], Any]
"""Returns a model of the student's shape, with any weights. It is called in the teacher's process."""

_NUMBERS = itertools.count(1)
_CLOSING_S = 15.0
_ROWS = 2**24  # logits of one projection, as in channels.distil

NOT_BEGUN = "begun_anew"
"""Reason of sites without lists: the teacher's process was begun anew, and has no weights yet."""


class SDPOTeacherActor(WorkerActor):
    """A moving average of the student that reads hints, in a process of its own.

    Args:
        make_model: Makes a model of the student's shape.
        rate: Share of the student in each update, in (0, 1].
        top_k: Number of tokens of each list.
        temperature: Divisor of the teacher's logits.
    """

    def __init__(self, make_model: MakeModel, rate: float, top_k: int, temperature: float) -> None:
        self._student, self._rate = make_model(), rate
        self._top_k, self._temperature = top_k, temperature
        self._teacher: TeacherCopy | None = None

    @endpoint
    async def pid(self) -> int:
        """Return the number of the process."""
        return os.getpid()

    @endpoint
    async def follow(self, weights: Mapping[str, Tensor]) -> bool:
        """Follow the student by one step; the first weights are taken as they are.

        Args:
            weights: The student's parameters by name.

        Returns:
            Whether they were the first.
        """
        with torch.no_grad():
            for name, own in self._student.named_parameters():
                own.copy_(weights[name])
        if self._teacher is None:
            self._teacher = TeacherCopy(self._student, self._rate)
            self._teacher.begin(self._student, torch.device("cpu"))
            return True
        self._teacher.update(self._student)
        return False

    @endpoint
    async def lists(self, rows: Sequence[Sequence[int]], positions: Sequence[Sequence[int]]) -> Any:
        """Return the likeliest tokens at positions of rows.

        Args:
            rows: Tokens of the rows.
            positions: Positions in each row, N in all.

        Returns:
            ``[N, K]`` ids and ``[N, K]`` log-probabilities; None before the first weights.
        """
        if self._teacher is None:
            return None
        model = self._teacher.model
        states, head = frozen_states(model, rows, positions), output_head(model)
        ids, logprobs = [], []
        with torch.no_grad():
            for part in states.split(max(1, _ROWS // len(head.weight))):
                logits = project(part, head.weight, head.bias)
                found = log_probabilities(head.transform(logits) if head.transform else logits, self._temperature)
                best = found.topk(min(self._top_k, found.shape[-1]), dim=-1)
                ids.append(best.indices)
                logprobs.append(best.values)
        return torch.cat(ids), torch.cat(logprobs)


class DistillationSupervisor(Supervisor):
    """Passes calls on to the teacher's actor, and says if it is lost."""

    @concurrent_endpoint
    async def ask(self, name: str, arguments: tuple[Any, ...], left_s: float) -> tuple[str, Any]:
        """Call an endpoint of the teacher.

        Args:
            name: Name of the endpoint.
            arguments: Arguments of the call.
            left_s: Time limit in seconds.

        Returns:
            An empty string and the result; or the reason why there is none, ``lost`` or ``deadline``, and None.
        """
        worker = self._best(set())
        if worker is None:
            return "lost", None
        try:
            return "", await self._called(worker, getattr(worker.actor, name).call_one(*arguments), left_s)
        except Lost as lost:
            return lost.reason, None


class SDPOTeacher:
    """The trainer's side of the teacher in another process. It is a context manager that ends the process.

    Its methods wait: an actor that trains calls them in a thread (`asyncio.to_thread`).

    Args:
        make_model: Makes a model of the student's shape, in the teacher's process.
        channels: Channels of the trainer (`channels_for` with ``teacher="live"``), whose loss of channel 2 becomes one
            of lists.
        rate: Share of the student in each update, in (0, 1].
        deadline_s: Time limit of a call in seconds.
        start_s: Longest wait for the process in seconds.
        hosts: Host of the process; None for this host.

    Attributes:
        counts: Number of sites that were not scored, by reason: ``lost``, ``deadline``, ``begun_anew``; of updates that
            did not arrive, as ``not_updated``; and of teachers that began as the student was then, as ``begun``.

    Raises:
        ValueError: The settings of channel 2 need more than lists of the teacher's likeliest tokens.
        Exception: The actor cannot be made: what ``make_model`` raised.
    """

    def __init__(
        self,
        make_model: MakeModel,
        channels: ChannelSet,
        *,
        rate: float = 0.05,
        deadline_s: float = 60.0,
        start_s: float = 120.0,
        hosts: HostMesh | None = None,
    ) -> None:
        if not 0.0 < rate <= 1.0 or not deadline_s > 0:
            raise ValueError(f"rate={rate}, deadline_s={deadline_s}: a rate in (0, 1], a deadline above 0")
        channels.distillation = ListedDistillation(channels.distillation)
        divergence = channels.distillation.divergence
        self.deadline_s, self.counts = deadline_s, Counter[str]()
        arguments = (make_model, rate, divergence.top_k, divergence.temperature)
        name = f"sdpo_teacher_{next(_NUMBERS)}"
        self._supervisor = this_proc().spawn(
            name, DistillationSupervisor, "sdpo", SDPOTeacherActor, arguments, 1, hosts
        )
        self._supervisor.start.call_one(start_s).get(timeout=start_s + _CLOSING_S)

    def update(self, student: Any) -> None:
        """Have the teacher follow the student by one step. The first call, before training, has it begin.

        A teacher that is lost takes no step (``not_updated``); one that was begun anew begins as the student is now.

        Args:
            student: The student, unwrapped.
        """
        weights = {name: one.detach().cpu() for name, one in student.named_parameters()}
        reason, first = self._asked("follow", weights)
        if reason or first:
            self.counts["not_updated" if reason else "begun"] += 1

    def lists(self, items: Sequence[Sequence[SdpoItem]]) -> tuple[list[tuple[SdpoItem, ...]], list[Any]]:
        """Return the sites of a batch with the teacher's lists, to put into it as ``sdpo_items`` and `LISTS`.

        Args:
            items: Sites of each row.

        Returns:
            The sites of each row and their `TokenLists`; without any where the teacher has no answer: the step goes on
            without channel 2, and `counts` says why.

        Raises:
            Exception: What the teacher's forward pass raised.
        """
        flat = [item for of_row in items for item in of_row]
        if not flat:
            return [() for _ in items], [() for _ in items]
        reason, found = self._asked(
            "lists", [item.teacher_ids for item in flat], [item.teacher_positions for item in flat]
        )
        if reason or found is None:
            self.counts[reason or NOT_BEGUN] += len(flat)
            log.warning("%d sites have no lists of the teacher: %s", len(flat), reason or NOT_BEGUN)
            return [() for _ in items], [() for _ in items]
        lengths = [len(item.target_ids) for item in flat]
        made = iter(map(TokenLists, *(part.split(lengths) for part in found)))
        return [tuple(of_row) for of_row in items], [tuple(next(made) for _ in of_row) for of_row in items]

    def pid(self) -> int | None:
        """Return the number of the teacher's process; None without one."""
        found: int | None = self._asked("pid")[1]
        return found

    def metrics(self) -> dict[str, float]:
        """Return counts since the start: ``sdpo/not_scored/REASON`` and ``sdpo/teacher/begun`` or ``not_updated``."""
        own = ("begun", "not_updated")
        return {
            f"sdpo/{'teacher' if name in own else 'not_scored'}/{name}": float(count)
            for name, count in sorted(self.counts.items())
        }

    def close(self) -> None:
        """End the teacher's process."""
        self._supervisor.end.call_one().get(timeout=_CLOSING_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, name: str, *arguments: Any) -> tuple[str, Any]:
        call = self._supervisor.ask.call_one(name, arguments, self.deadline_s)
        found: tuple[str, Any] = call.get(timeout=self.deadline_s + _CLOSING_S)
        return found
