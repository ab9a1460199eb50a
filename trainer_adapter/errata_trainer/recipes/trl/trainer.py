"""`ThreeChannelGRPOTrainer`: TRL's `GRPOTrainer` with Errata's signals in its batches and its loss."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object
from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from errata_protocol.errors import ServiceError

from ...channels.compose import DPO, SDPO, Term, compose, gradient_norms
from ...channels.forward import active_dropout, idle_loss
from ...channels.sdpo import Divergence
from ...counterfactual import Calls, CounterfactualCheck
from ...deliveries import Delivery
from ...hints import Hinter, HintRenderer, TemplateHinter
from ...playing import Seat
from ...rollout import DpoPair, Rollout, SdpoItem
from ...sites import Sites
from ...transcript import build_rollout
from .distillation import ITEMS, TOKENS, Distillation
from .ema import following, frozen_copy, has_adapter
from .environment import SeatedEnvironment
from .parallel_tools import ParallelTools, Transcripts
from .preferences import PAIR_COUNT, PAIRS, Own, Preferences
from .settings import ChannelSettings

Weight = float | Callable[[int], float]
"""Of a channel; or a schedule of it (`errata_trainer.channels.schedules`), by optimizer step from 0."""

log = logging.getLogger("errata.trainer")

LOST_BATCHES = 3
"""Batches in a row of which no episode could be counted, until training stops and says so."""


class PairSource(Protocol):
    """Where channel 3 has its pairs from."""

    def use(self, tokenizer: Any, end_ids: Sequence[int], reference: str, **template: Any) -> None:
        """Be told how the student speaks (tokenizer, ends of turns, chat template) and who the reference is."""
        ...

    def observe(self, rollouts: Sequence[Rollout], seats: Sequence[Seat | None], transcripts: Transcripts) -> None:
        """Be told of a batch; must not wait for anybody."""
        ...

    def sample(self, count: int, referred: Callable[[Sequence[DpoPair]], list[DpoPair]]) -> list[DpoPair]:
        """Return pairs to train on, at most ``count``; new ones get their reference by ``referred``."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return what is logged."""
        ...


class ThreeChannelGRPOTrainer(ParallelTools, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with total = grpo + alpha_sdpo * sdpo_kl + beta_replay * trace_replay_dpo; takes what it takes.

    Episodes of a batch play side by side, and one that the machine lost trains nothing: no reward, no advantage, no
    token. With a weight of zero a channel adds nothing and makes no forward pass; with both at zero, losses and
    gradients are those of `GRPOTrainer`, bit for bit.

    Channel 2 takes the student's states from GRPO's own forward pass, the teacher's from one without gradient over what
    its rows do not share; the loss is a mean over the target tokens of all ranks' generation batch. Channel 3 makes a
    pass over pairs and is a mean over them. Both follow TRL's ``dapo`` in how they are scaled for gradient
    accumulation.

    Args:
        *args: As `GRPOTrainer`.
        alpha_sdpo: Weight of channel 2, or a schedule of it by optimizer step.
        beta_replay: Weight of channel 3, likewise.
        beta_dpo: How strongly the reference holds in channel 3.
        jsd_beta: Of the generalized JSD: 0 is KL(teacher || student), 1 KL(student || teacher).
        token_clip: Upper bound in channel 2, None for none.
        settings: Everything else of the channels.
        hinter: Writes the hints of channel 2; default: the templates that ship.
        check: Asks the environment whether a hint helps; default: off.
        pairs: Where channel 3 has its pairs from; None is no channel 3.
        **kwargs: As `GRPOTrainer`.

    Raises:
        ValueError: Dropout acts in the student and ``alpha_sdpo`` is not 0; or a setting does not fit the model.
        ServiceError: While training, when all episodes of some batches in a row were lost.
    """

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: Weight = 0.1,
        beta_replay: Weight = 0.05,
        beta_dpo: float = 0.1,
        jsd_beta: float = 0.5,
        token_clip: float | None = 10.0,
        settings: ChannelSettings | None = None,
        hinter: Hinter | None = None,
        check: CounterfactualCheck | None = None,
        pairs: PairSource | None = None,
        **kwargs: Any,
    ) -> None:
        self.settings = settings or ChannelSettings()
        self.alpha_sdpo, self.beta_replay = alpha_sdpo, beta_replay
        self._pairs = pairs
        self._lost_batches = 0
        self._sites: Sites | None = None
        super().__init__(*args, **kwargs)
        divergence = Divergence(
            jsd_beta, self.settings.temperature, token_clip, self.settings.clip_mode, self.settings.top_k
        )
        self._distillation = Distillation(divergence, self.settings.teacher)
        student = self.accelerator.unwrap_model(self.model)
        if alpha_sdpo != 0:
            refuse_dropout(student)
        if self.settings.teacher == "ema" and alpha_sdpo != 0:  # a weight of zero has no teacher to keep
            self._distillation.follower = following(student, self.settings.ema_rate, self.accelerator)
            self.add_callback(self._distillation.follower)
        elif self.settings.teacher == "base" and not has_adapter(student):
            raise ValueError("teacher='base' is the model below an adapter, and there is none: use 'live' or 'ema'")
        self._preferences = Preferences(beta_dpo, self.settings.dpo_loss)
        self._initial: Any = None
        anchored = self.ref_model is not None or has_adapter(student)
        if pairs is not None and self.settings.dpo_reference == "initial" and not anchored:
            self._initial = frozen_copy(student)
        self._tool_schemas = [get_json_schema(tool) for tool in self.tools or ()]
        needs_logprobs = getattr(pairs, "policy", None) == "entropy" and getattr(pairs, "scores", None) is None
        if needs_logprobs and not self.args.use_vllm:
            raise ValueError(
                "policy='entropy' needs log-probabilities of sampled tokens: use_vllm=True, or give scores="
            )
        if self.environment_factories is not None:
            template = {"chat_template": self.chat_template, **self.chat_template_kwargs}
            if pairs is not None:
                pairs.use(self._tokenizer, self.eos_token_ids, self._reference(), **template)
            renderer = HintRenderer(self._tokenizer, tool_name=self.tools[0].__name__, **template)
            length = self.settings.max_teacher_length or longest_row(self.model.config)
            self._sites = Sites(
                hinter or TemplateHinter(count=renderer.count),
                renderer,
                self.settings.max_sites,
                length,
                check or CounterfactualCheck(),
            )

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *given: Any, **named: Any) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, *given, **named)
        if self._distillation.follower is not None:
            self._distillation.follower.checkpoint = resume_from_checkpoint

    def _weight(self, weight: Weight) -> float:
        return weight(self.state.global_step) if callable(weight) else weight

    # The batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        seats = self._seats()
        if seats is None:
            return batch
        self._leave_out_lost(batch, seats)
        if not self.model.training:
            return batch
        alpha, beta = self._weight(self.alpha_sdpo), self._weight(self.beta_replay)
        if (alpha or beta) and self.transcripts is not None:
            rollouts = self._rollouts(seats)
            if alpha and self._sites is not None:
                self._add_sites(batch, rollouts, seats)
            if beta and self._pairs is not None:
                self._add_pairs(batch, rollouts, seats)
        return batch

    def _seats(self) -> list[Seat | None] | None:
        """Return the seat of each row of the batch, None for one whose environment is not ours; None without any."""
        if not self.environments:
            return None
        return [e._seat if isinstance(e, SeatedEnvironment) else None for e in self.environments]

    def _add_sites(self, batch: dict[str, Any], rollouts: list[Rollout], seats: list[Seat | None]) -> None:
        assert self._sites is not None
        before = Counter(self._sites.counts)
        found = self._sites.found(rollouts, seats, self._tool_schemas)
        # A row whose attention TRL masks (mask_truncated_completions) has no states that could be compared.
        seen = batch["completion_mask"].any(1).tolist()
        found = self._sites.kept([site for site in found if seen[site.row]], seats, self._sample)
        items: list[tuple[SdpoItem, ...]] = [()] * len(rollouts)
        for site in found:
            items[site.row] = (*items[site.row], site.item)
        batch[ITEMS] = items
        batch[TOKENS] = self._everywhere(sum(len(site.item.target_ids) for site in found))
        self._count("sdpo/sites", len(found) / max(1, len(rollouts)))
        for reason, count in (self._sites.counts - before).items():
            self._count(f"sdpo/{reason}", float(count))
        for name, value in self._sites.check.metrics().items():
            if self._sites.check.mode != "off":
                self._count(name, value)

    def _add_pairs(self, batch: dict[str, Any], rollouts: list[Rollout], seats: list[Seat | None]) -> None:
        assert self._pairs is not None and self.transcripts is not None
        self._pairs.observe(rollouts, seats, self.transcripts)
        chosen = self._pairs.sample(self.settings.pairs_per_batch, self._referred)
        batch[PAIRS] = placed(chosen, rollouts)
        batch[PAIR_COUNT] = self._everywhere(len(chosen))
        for name, value in self._pairs.metrics().items():
            self._count(f"dpo/{name}", value)

    def _frozen(self) -> tuple[str, Any, bool]:
        """Return the reference of pairs: its name, the model, and whether its adapter is switched off for it."""
        if self.ref_model is not None:
            return "reference model", self.ref_model, False
        student = self.accelerator.unwrap_model(self.model)
        if has_adapter(student):
            return "base below the adapter", student, True
        if self._initial is not None:
            return "initial policy", self._initial, False
        return "policy when asked", student, False

    def _referred(self, pairs: Sequence[DpoPair]) -> list[DpoPair]:
        """Return pairs with the log-probabilities of their reference."""
        _, frozen, adapter = self._frozen()
        return self._preferences.referred(frozen, pairs, self._reference(), adapter=adapter)

    def _reference(self) -> str:
        """Return which weights and tokenizer make log-probabilities of pairs: those of others are refused."""
        whose, _, _ = self._frozen()
        name = getattr(self.model.config, "_name_or_path", "") or type(self.model).__name__
        vocabulary = json.dumps(sorted(self._tokenizer.get_vocab().items())).encode()
        return f"{whose} of {name}, tokenizer {hashlib.sha256(vocabulary).hexdigest()[:12]}"

    def _sample(self, contexts: Sequence[Sequence[int]]) -> list[Calls]:
        """Have the student take one turn behind each context; all ranks take part if one has to."""
        if not int(self._everywhere(len(contexts))):
            return []
        assert self._sites is not None
        asked = [list(context) for context in contexts] or [list(self._sites.renderer.header_ids)]
        ids, _ = self._generate_single_turn(asked, None, {}, num_generations=1)
        said = [parse_response(self._tokenizer, one, prefix=prefix) for one, prefix in zip(ids, asked, strict=True)]
        return [calls_of(message) for message in said[: len(contexts)]]

    def _everywhere(self, count: int) -> torch.Tensor:
        """Return the sum of a count over all ranks, 0-d float32."""
        mine = torch.tensor(float(count), device=self.accelerator.device)
        return self.accelerator.gather(mine).sum()

    # The loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the loss of a micro-batch, scaled for gradient accumulation: 0-d."""
        alpha = self._weight(self.alpha_sdpo) if float(inputs.get(TOKENS, 0.0)) else 0.0
        beta = self._weight(self.beta_replay) if float(inputs.get(PAIR_COUNT, 0.0)) else 0.0
        if not alpha and not beta:
            loss: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return loss
        student = self.accelerator.unwrap_model(model)
        with (
            self._distillation.capturing(student, inputs if alpha else {**inputs, ITEMS: ()}) as captured,
            self._preferences.capturing(student, inputs if beta else {**inputs, PAIRS: ()}) as own,
        ):
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        sdpo = None
        if alpha and captured is not None:
            summed, told = self._distillation.loss(student, inputs, captured)
            sdpo = Term(summed, self._of_a_step(inputs[TOKENS]))
            self._count_sums("sdpo", asdict(told), "tokens")
        dpo = self._preference_term(model, inputs, own) if beta else None
        total, parts = compose(
            loss,
            sdpo=sdpo,
            dpo=dpo,
            alpha_sdpo=alpha,
            beta_replay=beta,
            averaged_over=self.accelerator.num_processes,
        )
        for name, part in parts.items():
            self._count(name, float(part))
        if self.settings.gradient_norms:
            weighted = {"grpo": loss}
            for name, term, weight in ((SDPO, sdpo, alpha), (DPO, dpo, beta)):
                if term is not None:
                    weighted[name] = weight * term.mean_part()
            for name, norm in gradient_norms(weighted, self.model.parameters()).items():
                self._count(f"gradient_norm/{name}", float(norm))
        return total

    def _preference_term(self, model: Any, inputs: dict[str, Any], own: Own) -> Term | None:
        count = self._of_a_step(inputs[PAIR_COUNT])
        if not own.pairs:  # another rank's pass through the wrapper waits for one here
            together = self.accelerator.num_processes > 1
            return Term(idle_loss(model, token_id=self._tokenizer.pad_token_id), count) if together else None
        summed, told = self._preferences.loss(model, own, pad_id=self._tokenizer.pad_token_id)
        self._count_sums("dpo", told, "pairs")
        return Term(summed, count)

    def _of_a_step(self, total: torch.Tensor) -> torch.Tensor:
        """Return an optimizer step's part of what a generation batch has; as TRL's ``dapo``, in proportion.

        A generation batch is one step by default (``steps_per_generation`` is ``gradient_accumulation_steps``).
        """
        if not self.model.training:
            return total
        return total * self.current_gradient_accumulation_steps / self.args.steps_per_generation

    # What is told

    def _count(self, name: str, value: float) -> None:
        self._metrics["train" if self.model.training else "eval"][name].append(value)

    def _count_sums(self, channel: str, sums: Mapping[str, torch.Tensor], over: str) -> None:
        """Log means of this rank's micro-batch; TRL averages them over the logging step."""
        number = float(sums[over])
        for name, value in sums.items():
            self._count(f"{channel}/{name}", float(value) if name == over else float(value) / max(1.0, number))

    # What the machine did wrong

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        """Return TRL's rewards ``[B * processes, functions]``, those of lost episodes NaN: no function scores them."""
        rewards: torch.Tensor = super()._calculate_rewards(*arguments)
        seats = self._seats()
        if seats is not None:
            lost = gather_object([seat is not None and seat.lost is not None for seat in seats])
            if any(lost):
                rewards[torch.tensor(lost, device=rewards.device)] = torch.nan
        return rewards

    def _leave_out_lost(self, batch: dict[str, Any], seats: list[Seat | None]) -> None:
        """Take tokens of lost episodes out of every loss: without an advantage they are still in a KL term."""
        lost = torch.tensor([seat is not None and seat.lost is not None for seat in seats])
        whys = gather_object([seat.lost if seat is not None else None for seat in seats])
        count = sum(why is not None for why in whys)
        mode = "train" if self.model.training else "eval"
        self._metrics[mode]["episodes/lost"].append(count / len(whys))
        if count and "tool_mask" in batch:
            batch["tool_mask"][lost.to(batch["tool_mask"].device)] = 0
            tokens = (batch["completion_mask"] * batch["tool_mask"]).sum()
            batch["num_items_in_batch"] = self.accelerator.gather(tokens).sum()
        self._lost_batches = self._lost_batches + 1 if count == len(whys) else 0
        if self._lost_batches >= LOST_BATCHES:
            raise ServiceError(
                f"every episode of {self._lost_batches} batches in a row was lost, the last one by {whys[0]}: "
                "look at the server, then resume from the last checkpoint"
            )

    # What the students did

    def _rollouts(self, seats: list[Seat | None]) -> list[Rollout]:
        """Return the neutral record of each row."""
        transcripts = self.transcripts
        assert transcripts is not None
        logprobs = transcripts.logprobs
        opening = tool_call_opening(self._tokenizer)
        rollouts = []
        unread = 0
        for row, seat in enumerate(seats):
            reward = seat.finish() if seat is not None else None
            try:
                rollout = build_rollout(
                    transcripts.prompt_ids[row],
                    transcripts.completion_ids[row],
                    transcripts.masks[row],
                    transcripts.messages[row],
                    deliveries(seat) if seat is not None else (),
                    tools=self._tool_schemas,
                    opening=opening,
                    eid=seat.eid if seat is not None else None,
                    environment=seat.environment.name if seat is not None else None,
                    reward=reward,
                    logprobs=logprobs[row] if logprobs is not None else None,
                    end_ids=[*self.eos_token_ids, self._tokenizer.pad_token_id],
                    lost=seat.lost if seat is not None else None,
                    task=seat.task if seat is not None else None,
                )
            except ValueError as error:  # GRPO has trained on it all the same; only our channels cannot read it
                log.warning(
                    "row %d has no turns that can be told apart, and channels 2 and 3 leave it out: %s", row, error
                )
                unread += 1
                rollout = without_turns(
                    transcripts.prompt_ids[row], transcripts.completion_ids[row], transcripts.masks[row], reward
                )
            rollouts.append(rollout)
        if unread:
            self._count("rollouts/unread", float(unread))
        return rollouts


def refuse_dropout(student: Any) -> None:
    """Refuse a student that differs from itself: channel 2 would distil the noise.

    Raises:
        ValueError: Dropout acts in a module while the student is trained.
    """
    mode = student.training
    student.train()
    try:
        noisy = active_dropout(student)
    finally:
        student.train(mode)
    if noisy:
        raise ValueError(
            f"channel 2 would distil dropout's noise ({noisy[0]} and {len(noisy) - 1} other modules): "
            "set disable_dropout=True in GRPOConfig and lora_dropout=0.0 in LoraConfig, or alpha_sdpo=0"
        )


def longest_row(config: Any) -> int | None:
    """Return how many positions a model has, a multimodal one's text model; None where its configuration has none."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def deliveries(seat: Seat) -> list[Delivery]:
    """Return what a seat knows of its episode's calls."""
    return [Delivery(call.t, call.tool, call.arguments, call.text, call.marker, seat.eid) for call in seat.played]


def without_turns(
    prompt_ids: Sequence[int], completion_ids: Sequence[int], mask: Sequence[int] | None, reward: float | None
) -> Rollout:
    """Return the record of a rollout whose turns cannot be told apart: it has none."""
    sampled = [1] * len(completion_ids) if mask is None else [int(bool(one)) for one in mask]
    return Rollout(
        prompt_ids=tuple(prompt_ids), completion_ids=tuple(completion_ids), mask=tuple(sampled), turns=(), reward=reward
    )


def calls_of(message: Mapping[str, Any]) -> Calls:
    """Return the tool calls of a parsed message that could be made."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [
        (str(function.get("name")), function["arguments"])
        for function in functions
        if isinstance(function.get("arguments"), Mapping)
    ]


def tool_call_opening(tokenizer: Any) -> str | None:
    """Return the text with which a tool call begins, where the tokenizer says so: without a call it is malformed."""
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields") if isinstance(template, Mapping) else None
    calls = fields.get("tool_calls") if isinstance(fields, Mapping) else None
    opening = calls.get("open") if isinstance(calls, Mapping) else None
    return opening if isinstance(opening, str) else None


def placed(pairs: Sequence[DpoPair], rollouts: Sequence[Rollout]) -> list[tuple[DpoPair, ...]]:
    """Return pairs by row: each in the row whose own turn it rejects, so that GRPO's pass serves it too, or in any."""
    rows: list[tuple[DpoPair, ...]] = [()] * len(rollouts)
    ids = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
    for number, pair in enumerate(pairs):
        said = pair.context_ids + pair.rejected_ids
        own = [row for row, one in enumerate(ids) if one[: len(said)] == said]
        row = min(own or range(len(rows)), key=lambda row: (len(rows[row]), (row - number) % len(rows)))
        rows[row] = (*rows[row], pair)
    return rows
