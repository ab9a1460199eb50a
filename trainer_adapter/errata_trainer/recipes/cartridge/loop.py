"""`CartridgeTrainer`: distils a document into a cartridge on what the student itself says with it.

The teacher is the same frozen model with the document in front of the prompt, the student has the cartridge there. So a
step is channel 2 with one constant hint, and the cartridge as the only parameter. Rollouts come from a server that has
the cartridge as it is now; each step compares its log-probabilities with the trainer's own.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from errata_protocol.errors import ServiceError

from ...channels.distil import action_logprobs, distil
from ...channels.forward import frozen_states, longest_row, refuse_dropout, trained_states
from ...channels.heads import output_head
from ...channels.sdpo import Divergence
from ...rollouts.rollout import Rollout, SdpoItem, Turn
from .files import cartridge_of, check_id, remove_cartridge, sliding_window, write_cartridge
from .server import TokasaurusClient

log = logging.getLogger("errata.trainer")


def document_item(document_ids: Sequence[int], rollout: Rollout) -> SdpoItem:
    """Return a rollout's only turn as an item whose hint is a document in front of everything.

    Args:
        document_ids: Tokens of the document.
        rollout: Rollout of one turn.
    """
    [turn] = rollout.turns
    student, teacher = len(rollout.prompt_ids), len(document_ids) + len(rollout.prompt_ids)
    own = rollout.completion_ids[turn.start : turn.stop]
    return SdpoItem(
        turn.index,
        (*document_ids, *rollout.prompt_ids, *rollout.completion_ids[: turn.stop]),
        tuple(student - 1 + turn.start + place for place in range(len(own))),
        tuple(teacher - 1 + turn.start + place for place in range(len(own))),
        own,
    )


class CartridgeTrainer:
    """Trains the cartridge of a model on its own rollouts.

    Args:
        model: Model with a cartridge, `cartridge_model`.
        client: Client of the server that plays rollouts, with the same base model.
        directory: The server's directory of cartridges, which both see.
        document_ids: Tokens of the document; see `errata_trainer.recipes.cartridge.documents`.
        divergence: Divergence of the student from the teacher; default: KL(teacher || student) over the teacher's 20
            likeliest tokens and the rest.
        learning_rate: Learning rate of Adam.
        tolerance: Largest difference between the server's log-probability of a token and the trainer's, in nats; None
            is 0.001 for a model in float32, and 0.1 for one in half precision, whose numerics differ by the server's.
        check_every: Number of steps after which the two are compared; 1 is every step.
        name: Beginning of the ids of this run's cartridges. A random part follows, because a server that is still
            running has read those of earlier runs.
        ignore_eos: Whether rollouts go on behind the model's end token.

    Attributes:
        cartridge_id: Id of the cartridge as the server has it.
        steps: Number of steps made.
        optimizer: Adam of the cartridge. To go on with a run, keep its ``state_dict`` beside the last cartridge
            (`load_cartridge`).

    Raises:
        ValueError: An option is out of its range; dropout or gradient checkpointing is active in the model; the
            document is longer than the model's rows.
    """

    def __init__(
        self,
        model: PeftModel,
        client: TokasaurusClient,
        directory: Path,
        document_ids: Sequence[int],
        *,
        divergence: Divergence | None = None,
        learning_rate: float = 0.02,
        tolerance: float | None = None,
        check_every: int = 1,
        name: str = "errata",
        ignore_eos: bool = False,
    ) -> None:
        if check_every < 1:
            raise ValueError(f"check_every is {check_every}: give at least 1")
        if tolerance is not None and not tolerance > 0:
            raise ValueError(f"tolerance is {tolerance}: give more than 0, or None")
        if not document_ids:
            raise ValueError("the document is empty")
        self._name = f"{name}-{secrets.token_hex(4)}"
        check_id(f"{self._name}-000000")
        refuse_dropout(model)
        self.model, self.client, self.directory = model, client, Path(directory)
        self.document_ids = tuple(document_ids)
        self.divergence = divergence or Divergence(0.0, token_clip=None, top_k=20, tail=True)
        if getattr(model.get_base_model(), "is_gradient_checkpointing", False):
            raise ValueError("a cartridge does not work with gradient checkpointing: switch it off in the base model")
        is_wide = next(model.get_base_model().parameters()).dtype in (torch.float32, torch.float64)
        self._tolerance = tolerance if tolerance is not None else 1e-3 if is_wide else 0.1
        self._check_every, self._ignore_eos = check_every, ignore_eos
        config = model.get_base_model().config
        self._longest = min(filter(None, (longest_row(config), sliding_window(config))), default=None)
        self._fits(len(self.document_ids))
        self.parameters = [one for one in model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.Adam(self.parameters, lr=learning_rate)
        self.steps = 0
        self._written: list[str] = []
        self._is_written = False
        self.cartridge_id = self._write()

    def step(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, count: int = 1) -> dict[str, float]:
        """Make a step on rollouts of the server, and give the server the new cartridge.

        Args:
            prompts: Tokens of each prompt, without the document.
            max_tokens: Most tokens of a rollout.
            count: Number of rollouts of each prompt.

        Returns:
            ``cartridge/kl``, the divergence before the step in nats a token; ``cartridge/tokens``;
            ``cartridge/apart``, the largest difference between the server's and the trainer's log-probabilities, in
            steps that compare them; ``cartridge/grad_norm``; ``cartridge/document_tokens_saved``, tokens of the
            document that rollouts did not carry.

        Raises:
            ServiceError: The server failed, or has another model or cartridge than the trainer. Nothing was trained.
            InvalidRequest: The server refuses the request.
            ValueError: There are no prompts, or a prompt does not fit into the model's rows behind the document; or the
                loss or its gradient is not finite. Nothing was trained.
            OSError: The new cartridge could not be written. The step was made; the next one writes it.
        """
        if not prompts:
            raise ValueError("there are no prompts")
        self._fits(len(self.document_ids) + max(map(len, prompts)) + max_tokens)
        must_check = not self._is_written or self.steps % self._check_every == 0
        rollouts = self.rollouts(prompts, max_tokens=max_tokens, count=count)
        items = [document_item(self.document_ids, rollout) for rollout in rollouts]
        student = self._student(rollouts, items)
        metrics: dict[str, float] = {}
        if must_check:
            metrics["cartridge/apart"] = self._check(student.detach(), rollouts)
        head = output_head(self.model.get_base_model())
        summed, measured = distil(
            student,
            self._teacher(items),
            head.weight,
            head.bias,
            transform=head.transform,
            divergence=self.divergence,
        )
        loss = summed / measured.tokens
        self.optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([one.grad for one in self.parameters if one.grad is not None])
        if not (torch.isfinite(norm) and torch.isfinite(loss)):
            self.optimizer.zero_grad()
            found = float(loss.detach())
            raise ValueError(f"the loss is {found:g}, the norm of its gradient {float(norm):g}: no step was made")
        self._is_written = False
        self.optimizer.step()
        self.steps += 1
        self.cartridge_id = self._write()
        return {
            "cartridge/kl": float(loss.detach()),
            "cartridge/tokens": float(measured.tokens),
            "cartridge/grad_norm": float(norm),
            "cartridge/document_tokens_saved": float(
                len(rollouts) * (len(self.document_ids) - cartridge_of(self.model).tokens)
            ),
            **metrics,
        }

    def rollouts(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, count: int = 1) -> list[Rollout]:
        """Return rollouts of the server with the cartridge as it is now.

        Args:
            prompts: Tokens of each prompt, without the document.
            max_tokens: Most tokens of a rollout.
            count: Number of rollouts of each prompt.

        Raises:
            ServiceError: The server failed.
            InvalidRequest: The server refuses the request.
        """
        if not self._is_written:
            self.cartridge_id = self._write()
        vocabulary = len(output_head(self.model.get_base_model()).weight)
        made = [
            Rollout(
                tuple(prompt),
                one.ids,
                (1,) * len(one.ids),
                (Turn(0, 0, len(one.ids)),),
                logprobs=one.logprobs,
                truncated=one.finish == "length",
            )
            for prompt in prompts
            for one in self.client.complete(
                prompt, max_tokens=max_tokens, cartridge=self.cartridge_id, count=count, ignore_eos=self._ignore_eos
            )
        ]
        if (highest := max((max(one.completion_ids) for one in made), default=0)) >= vocabulary:
            raise ServiceError(
                f"the server sampled token {highest}, and the model has {vocabulary}: it has another model"
            )
        return made

    def divergence_of(self, rollouts: Sequence[Rollout], divergence: Divergence | None = None) -> float:
        """Return the divergence on rollouts in nats a token, without training.

        Args:
            rollouts: Rollouts of one turn each.
            divergence: Divergence to measure; default: KL(teacher || student) over the whole vocabulary.
        """
        items = [document_item(self.document_ids, rollout) for rollout in rollouts]
        head = output_head(self.model.get_base_model())
        with torch.no_grad():
            summed, measured = distil(
                self._student(rollouts, items),
                self._teacher(items),
                head.weight,
                head.bias,
                transform=head.transform,
                divergence=divergence or Divergence(0.0, token_clip=None),
            )
        return float(summed / measured.tokens)

    def _fits(self, tokens: int) -> None:
        """Raise ValueError if a row of so many tokens is longer than those that the model takes."""
        if self._longest is not None and tokens > self._longest:
            raise ValueError(
                f"the teacher would read {tokens} tokens (document, prompt and completion), and the model sees "
                f"{self._longest}: give a shorter document, prompt or max_tokens"
            )

    def _student(self, rollouts: Sequence[Rollout], items: Sequence[SdpoItem]) -> Tensor:
        rows = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
        return trained_states(self.model, rows, [item.student_positions for item in items])

    def _teacher(self, items: Sequence[SdpoItem]) -> Tensor:
        rows, positions = [item.teacher_ids for item in items], [item.teacher_positions for item in items]
        return frozen_states(self.model.get_base_model(), rows, positions)

    def _check(self, states: Tensor, rollouts: Sequence[Rollout]) -> float:
        """Return the largest difference between the server's log-probabilities and the trainer's."""
        head = output_head(self.model.get_base_model())
        ids = torch.tensor([token for rollout in rollouts for token in rollout.completion_ids], device=states.device)
        with torch.no_grad():
            own = action_logprobs(states, ids, head.weight, head.bias, transform=head.transform)
        servers = torch.tensor([one for rollout in rollouts for one in rollout.logprobs or ()], device=states.device)
        apart = float((own - servers).abs().max())
        if not apart <= self._tolerance:
            raise ServiceError(
                f"the server's log-probabilities with the cartridge {self.cartridge_id} are up to {apart:.3g} nats "
                f"apart from the trainer's, and tolerance={self._tolerance:g}: it has another model, or does not use "
                "this cartridge (an older one under the same id, another directory, none). Nothing was trained"
            )
        return apart

    def _write(self) -> str:
        """Write the cartridge under a new id, and remove those that no request uses any more."""
        name = f"{self._name}-{self.steps:06d}"
        write_cartridge(
            self.directory,
            name,
            cartridge_of(self.model),
            model_name=str(getattr(self.model.get_base_model().config, "_name_or_path", "")),
        )
        self._is_written = True
        self._written.append(name)
        while len(self._written) > 3:
            remove_cartridge(self.directory, self._written.pop(0))
        return name
