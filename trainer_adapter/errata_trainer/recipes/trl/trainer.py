"""`ThreeChannelGRPOTrainer`: TRL's `GRPOTrainer` with channels 2 and 3 added to its loss."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.utils import gather_object
from rich.console import Console
from transformers.utils import get_json_schema
from trl import GRPOTrainer
from trl.chat_template_utils import parse_response

from errata_protocol.errors import ServiceError

from ...assembly.channel_set import channels_for, driver_for, needs_initial, reference_name
from ...assembly.counterfactual import Calls, CounterfactualCheck, acceptance, calls_of
from ...assembly.distillation import ITEMS, TOKENS
from ...assembly.driver import ChannelDriver
from ...assembly.layouts import PROMPT_LENGTHS
from ...assembly.losses import ChannelLosses
from ...assembly.pair_source import PairSource
from ...assembly.preferences import OWN, PAIR_COUNT, PAIRS, rejected_here
from ...channels.compose import DPO, SDPO, gradient_norms
from ...channels.forward import longest_row
from ...channels.prm import shaped_advantages
from ...channels.schedules import Weight, has_weight, weight_at
from ...episodes.labels import episode_labels
from ...episodes.playing import EpisodeRunner, worth_a_look
from ...hints import Hinter
from ...monitoring.completions import EID, Marked, completion_table, described, marked_turns
from ...monitoring.metrics import Metrics
from ...monitoring.progress import health
from ...rollouts.rollout import DpoPair, Rollout
from ...settings import ChannelSettings
from .callbacks import ChannelCallback
from .environment import EpisodeEnvironment
from .parallel_tools import ParallelTools
from .progress import show_lines
from .refusals import refuse_models_without_states, refuse_second_adapter, refuse_sharded_copy

LOST_BATCHES = 3
"""Batches in a row of which no episode could be counted, until training stops and says so."""


class ThreeChannelGRPOTrainer(ParallelTools, GRPOTrainer):  # type: ignore[misc]
    """`GRPOTrainer` with the loss grpo + alpha_sdpo * sdpo_kl + beta_replay * trace_replay_dpo.

    It takes the arguments of `GRPOTrainer`. Episodes of a batch are played in parallel. A lost episode trains nothing:
    it has no reward and no advantage, and its tokens are masked. A channel with weight zero adds nothing and makes no
    forward pass; with both at zero, losses and gradients are bit-equal to `GRPOTrainer`'s.

    Channel 2 takes the student's hidden states from GRPO's own forward pass and the teacher's from a pass without
    gradient; its loss is a mean over the target tokens of the generation batch of all ranks. Channel 3 makes a pass
    over pairs and is a mean over them. Both are scaled for gradient accumulation as TRL's ``dapo`` loss. If channel 2
    has a weight, dropout is switched off in the student, with a warning.

    Args:
        *args: Arguments of `GRPOTrainer`.
        alpha_sdpo: Weight of channel 2, or a schedule of it by optimizer step.
        beta_replay: Weight of channel 3, or a schedule of it by optimizer step.
        beta_dpo: DPO's beta: how strongly channel 3 keeps the policy near its reference.
        jsd_beta: Weight of the teacher in the generalized JSD: 0 is KL(teacher || student), 1 KL(student || teacher).
        token_clip: Upper bound of the divergence in channel 2; None for none.
        settings: All other options of the channels.
        hinter: Writer of the hints of channel 2; default: the templates of this package.
        check: Check in the environment whether hints help; default: off.
        pairs: Source of channel 3's pairs; None switches channel 3 off.
        **kwargs: Further arguments of `GRPOTrainer`.

    Raises:
        ValueError: A setting does not fit the model; the model is compiled or spread over several devices; or the
            check needs generation that TRL cannot do here (vLLM's server mode with several processes).
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
        self._lost_batches = 0
        self._channel_metrics: dict[str, Metrics] = {"train": Metrics(), "eval": Metrics()}
        self._logged_step = 0
        self._shown_eid: str | None = None
        self._labelled = (-1, "", 0)
        self._driver: ChannelDriver | None = None
        super().__init__(*args, **kwargs)
        if self.settings.progress:
            show_lines(self, lambda: self._shown_eid)
        # TRL's own table, which knows no failing turns, is not printed; its files and trackers get the column `errors`.
        self._completions_to_print: int | None = self.args.num_completions_to_print
        self.num_completions_to_print = 0
        self._marked: deque[Marked] = deque(maxlen=self.args.generation_batch_size)
        self._viewers: deque[str] = deque(maxlen=self.args.generation_batch_size)
        check = check or CounterfactualCheck()
        student = self.accelerator.unwrap_model(self.model)
        self._refuse(student, pairs, check)
        self._channels = channels_for(
            self.settings,
            student=student,
            alpha_sdpo=alpha_sdpo,
            beta_replay=beta_replay,
            beta_dpo=beta_dpo,
            jsd_beta=jsd_beta,
            token_clip=token_clip,
            pairs=pairs,
            check=check,
            hinter=hinter,
            has_reference=self.ref_model is not None,
            sampling_temperature=self.args.temperature,
            keep=self.num_iterations > 1,
            precision=self.accelerator.autocast,
            head_precision=self._head_precision,
        )
        self._distillation, self._preferences = self._channels.distillation, self._channels.preferences
        self._watch = self._channels.watch
        whose, _, _ = self._channels.reference(student, self.ref_model)
        self._reference = reference_name(whose, self.model.config, self._tokenizer)
        if self.environment_factories is not None:
            self._driver = driver_for(
                self.settings,
                tokenizer=self._tokenizer,
                end_ids=self.eos_token_ids,
                pad_ids=[self._tokenizer.pad_token_id],
                tools=[get_json_schema(tool) for tool in self.tools],
                model_config=self.model.config,
                distilling=alpha_sdpo != 0,
                hinter=hinter,
                check=check,
                pairs=pairs,
                reference=self._reference,
                has_logprobs=self.args.use_vllm,
                metrics=self._channel_metrics["train"],
                chat_template=self.chat_template,
                **self.chat_template_kwargs,
            )
        self._channel_callback = ChannelCallback(self._channels, self.accelerator, self._begin_at)
        self.add_callback(self._channel_callback)

    def _begin_at(self, step: int) -> None:
        self._logged_step = step

    def _refuse(self, student: Any, pairs: PairSource | None, check: CounterfactualCheck) -> None:
        """Raise ValueError for what TRL's trainer cannot do with the channels.

        Raises:
            ValueError: The message names the setting to change.
        """
        if self.alpha_sdpo != 0 or (pairs is not None and self.beta_replay != 0):
            compiled = self.args.torch_compile or hasattr(self.model, "_orig_mod")
            refuse_models_without_states(student, compiled=compiled)
        teacher = self.settings.teacher
        if teacher in ("ema", "initial") and self.alpha_sdpo != 0:
            refuse_sharded_copy(self.accelerator, f"teacher={teacher!r}", "teacher='live'")
            refuse_second_adapter(student, self.args.use_vllm)
        if needs_initial(self.settings, pairs, student, has_reference=self.ref_model is not None):
            refuse_sharded_copy(self.accelerator, "dpo_reference='initial'", "dpo_reference='when_asked'")
        if pairs is not None and pairs.needs_logprobs and not self.args.use_vllm:
            raise ValueError(
                "policy='entropy' needs log-probabilities of sampled tokens: use_vllm=True, or give scores="
            )
        server = self.args.use_vllm and self.args.vllm_mode == "server"
        if check.mode != "off" and server and self.accelerator.num_processes > 1:
            raise ValueError(
                "the counterfactual check samples another turn for some rows, and TRL's client of a vLLM server "
                "mixes up the answers of several processes: use vllm_mode='colocate', or check=None"
            )

    def _head_precision(self) -> AbstractContextManager[Any]:
        """Return the context for products with the output embedding: the precision of TRL's own log-probabilities."""
        device, cast = self.accelerator.device.type, self.args.cast_lm_head_to_fp32
        context: AbstractContextManager[Any] = (
            torch.autocast(device, enabled=False) if cast else self.accelerator.autocast()
        )
        return context

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        # Every resume calls this before `on_train_begin`; with DeepSpeed, `_load_from_checkpoint` is not called.
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._channel_callback.checkpoint = checkpoint

    def _weight(self, weight: Weight) -> float:
        return weight_at(weight, self.state.global_step)

    def _has_weight(self, weight: Weight) -> bool:
        """Return whether a weight is non-zero in any step that trains on the generation batch that is being made."""
        uses = self.args.steps_per_generation * self.num_iterations / self.args.gradient_accumulation_steps
        first = self.state.global_step
        return has_weight(weight, range(first, first + max(1, math.ceil(uses))))

    def _may_have_weight(self, weight: Weight) -> bool:
        """Return whether a weight is non-zero in this step or in any later one."""
        first = self.state.global_step
        return has_weight(weight, range(first, max(self.state.max_steps, first + 1)))

    # The batch

    def _label_all(self, environments: Sequence[Any]) -> None:
        training, step = self.model.training, self.state.global_step
        size = self.num_generations if training else self.num_generations_eval
        mode = "train" if training else "eval"
        # A step may have several batches. All ranks count alike: a group may lie on two of them.
        self._labelled = (step, mode, self._labelled[2] + 1 if self._labelled[:2] == (step, mode) else 0)
        batch = "-".join(map(str, self._labelled))
        first = self.accelerator.process_index * len(environments)
        for place, environment in enumerate(environments, first):
            if hasattr(environment, "_label"):
                run, group = self.args.run_name or self.args.output_dir, f"{batch}-{place // size}"
                environment._label(episode_labels(run=run, step=step, group=group))

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        runners = self._runners()
        if runners is None:
            return batch
        self._leave_out_lost(batch, runners)
        self._shown_eid = worth_a_look([runner for runner in runners if runner is not None])
        driver, transcripts = self._driver, self.transcripts
        if self.log_completions:
            self._mark_completions(runners)
        if not self.model.training or driver is None or transcripts is None:
            return batch
        # Teachers are asked as soon as channel 3 may ever have a weight: their answers take a while.
        scoring = self.settings.prm_weight != 0.0
        asking = driver.pair_source is not None and (self._may_have_weight(self.beta_replay) or scoring)
        distilling = self._has_weight(self.alpha_sdpo)
        if distilling or asking:
            self._distillation.update_guard()
            self._distillation.clear_kept()
            rollouts = driver.rollouts(transcripts, runners)
            batch[PROMPT_LENGTHS] = [len(rollout.prompt_ids) for rollout in rollouts]
            # A row whose attention TRL masks (mask_truncated_completions) has no states that could be compared.
            seen = batch["completion_mask"].any(1).tolist()
            if distilling:
                self._add_sites(driver, batch, rollouts, runners, seen)
            if asking:
                driver.ask(rollouts, runners, transcripts)
                comparing = self._has_weight(self.beta_replay)
                if comparing or scoring:  # the votes come with the pairs, also where no pair is used
                    count = self.settings.pairs_per_batch if comparing else 0
                    rows = driver.pairs(count, rollouts, self._referred)
                if scoring:
                    self._shape_advantages(driver, batch, rollouts)
                if comparing:
                    batch[PAIRS] = rows
                    batch[OWN] = [
                        rejected_here(pairs, rollout, trained=trained)
                        for pairs, rollout, trained in zip(rows, rollouts, seen, strict=True)
                    ]
                    batch[PAIR_COUNT] = self._sum_over_ranks(sum(len(pairs) for pairs in rows))
        return batch

    def _mark_completions(self, runners: list[EpisodeRunner | None]) -> None:
        """Add the failing turns, the eid and the viewer of each row to the logged table of completions.

        The rows of all processes are gathered, so every process has to call this.

        Args:
            runners: The runner of each row in this process's batch; None where a row has no episode.
        """
        marked: list[Marked] = [{} for _ in runners]
        if self._driver is not None and self.transcripts is not None:
            marked = [marked_turns(rollout) for rollout in self._driver.read(self.transcripts, runners)[0]]
        everywhere = gather_object(marked)
        self._marked.extend(everywhere)
        self._logs["extra"]["errors"].extend(described(one) for one in everywhere)
        eids = gather_object([runner.eid if runner is not None else None for runner in runners])
        self._logs["extra"][EID].extend(eid or "" for eid in eids)
        viewers = [e._viewer if isinstance(e, EpisodeEnvironment) else "" for e in self.environments or ()]
        self._viewers.extend(gather_object(viewers))

    def _runners(self) -> list[EpisodeRunner | None] | None:
        """Return the runner of each row, None for rows of other environments; None if there are no environments."""
        if not self.environments:
            return None
        return [e._runner if isinstance(e, EpisodeEnvironment) else None for e in self.environments]

    def _add_sites(
        self,
        driver: ChannelDriver,
        batch: dict[str, Any],
        rollouts: list[Rollout],
        runners: list[EpisodeRunner | None],
        seen: Sequence[bool],
    ) -> None:
        batch[ITEMS] = driver.items(rollouts, runners, sample=self._sample, trained=seen)
        batch[TOKENS] = self._sum_over_ranks(sum(len(item.target_ids) for items in batch[ITEMS] for item in items))

    def _shape_advantages(self, driver: ChannelDriver, batch: dict[str, Any], rollouts: list[Rollout]) -> None:
        """Add the teachers' scores of turns to the advantages, which become ``[B, T]``."""
        advantages, width = batch["advantages"], batch["completion_mask"].size(1)
        added = shaped_advantages(
            rollouts, driver.turn_scores(rollouts), weight=self.settings.prm_weight, length=width
        ).to(advantages)
        batch["advantages"] = (advantages.unsqueeze(1) if advantages.dim() == 1 else advantages) + added

    def _referred(self, pairs: Sequence[DpoPair]) -> list[DpoPair]:
        """Return pairs with the reference's log-probabilities filled in."""
        student = self.accelerator.unwrap_model(self.model)
        return self._channels.referred(pairs, self._reference, student, self.ref_model)

    def _sample(self, contexts: Sequence[Sequence[int]]) -> list[Calls | None]:
        """Sample one turn of the student after each context; None for contexts that are too long.

        All ranks take part if one has to, with equally many contexts: generation over several ranks assumes that.
        """
        most = max(gather_object([len(contexts)]))
        if not most or self._driver is None or self._driver.sites is None:
            return [None] * len(contexts)
        filler = list(self._driver.sites.renderer.header_ids)
        longest = self._longest_context()
        fits = [longest is None or len(context) <= longest for context in contexts]
        asked = [list(context) if fit else filler for context, fit in zip(contexts, fits, strict=True)]
        asked += [filler] * (most - len(asked))
        ids, _ = self._generate_single_turn(asked, None, {}, num_generations=1)
        calls: list[Calls | None] = []
        for context, fit, sampled in zip(asked, fits, ids, strict=False):  # what follows are fillers
            # TRL parses a rollout's turns with its tools, too: some templates know the type of an argument only so.
            message = parse_response(self._tokenizer, sampled, prefix=context, tools=self.tools) if fit else {}
            calls.append(calls_of(message) if fit else None)
        return calls

    def _longest_context(self) -> int | None:
        """Return the longest context that generation accepts; None if there is no bound."""
        if self.args.use_vllm and self.args.vllm_mode == "colocate":
            return int(self.vllm_generation.llm.llm_engine.model_config.max_model_len) - 1
        if self.args.use_vllm and self.args.vllm_max_model_length is not None:
            return int(self.args.vllm_max_model_length) - 1
        return longest_row(self.model.config)

    def _sum_over_ranks(self, count: int) -> torch.Tensor:
        """Return the sum of a count over all ranks, 0-d float32 on the CPU, so that reading it does not wait for the
        device."""
        own = torch.tensor(float(count), device=self.accelerator.device)
        return self.accelerator.gather(own).sum().cpu()

    # The loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """Return the loss of a micro-batch (0-d), scaled for gradient accumulation."""
        alpha = self._watch.dose * self._weight(self.alpha_sdpo) if float(inputs.get(TOKENS, 0.0)) else 0.0
        beta = self._weight(self.beta_replay) if float(inputs.get(PAIR_COUNT, 0.0)) else 0.0
        if not alpha and not beta:
            loss: torch.Tensor = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            self._count_parts({"loss/grpo": loss.detach()})
            return loss
        student = self.accelerator.unwrap_model(model)
        losses = self._losses
        with losses.capturing(student, inputs, alpha=alpha, beta=beta) as states:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        total, parts, terms = losses.total(
            loss,
            model,
            student,
            inputs,
            states,
            {
                name: self._count_per_step(inputs[key])
                for name, key, weight in ((SDPO, TOKENS, alpha), (DPO, PAIR_COUNT, beta))
                if weight
            },
            alpha=alpha,
            beta=beta,
            # TRL has them from vLLM, or where a batch is trained on after the policy has moved.
            old_logprobs=inputs.get("sampling_per_token_logps", inputs.get("old_per_token_logps")),
        )
        self._count_parts(parts)
        if self.settings.gradient_norms:
            weights = {SDPO: alpha, DPO: beta}
            weighted = {"grpo": loss, **{name: weights[name] * term.mean_part() for name, term in terms.items()}}
            for name, norm in gradient_norms(weighted, self.model.parameters()).items():
                self._metrics_now.mean(f"gradient_norm/{name}", norm)
        return total

    @property
    def _losses(self) -> ChannelLosses:
        return ChannelLosses(
            self._distillation,
            self._preferences,
            self._metrics_now,
            processes=self.accelerator.num_processes,
            pad_id=self._tokenizer.pad_token_id,
        )

    def _count_per_step(self, total: torch.Tensor) -> torch.Tensor:
        """Return the share of one optimizer step in a count of the generation batch.

        A generation batch is one step by default (``steps_per_generation`` is ``gradient_accumulation_steps``).
        """
        if not self.model.training:
            return total
        return total * self.current_gradient_accumulation_steps / self.args.steps_per_generation

    # Metrics

    @property
    def _metrics_now(self) -> Metrics:
        return self._channel_metrics["train" if self.model.training else "eval"]

    def _count_parts(self, parts: dict[str, torch.Tensor]) -> None:
        """Record the parts of the loss of a micro-batch. An evaluation has GRPO's loss only, which is logged as its
        loss."""
        if self.model.training:
            self._losses.record(parts)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as TRL does, with the channels' metrics of all ranks. All ranks have to call it."""
        steps = self.state.global_step - self._logged_step
        if self.model.training:
            self._logged_step = self.state.global_step
        self._distillation.update_guard()
        found = self._read_metrics(steps)
        if self.model.training and steps:
            self._watch.see(found)
            if self.settings.lower_dose:
                found["sdpo/dose"] = self._watch.dose
        logs.update(found)
        super().log(logs, start_time)
        ended = "train_runtime" in logs  # the summary at the end is no step
        if self.log_completions and self.accelerator.is_main_process and self._logs["prompt"] and not ended:
            self._print_completions(logs)

    def _print_completions(self, logs: dict[str, float]) -> None:
        kept = self._logs
        marked = list(self._marked) or [{}] * len(kept["prompt"])
        Console().print(
            completion_table(
                list(kept["prompt"]),
                list(kept["completion"]),
                {name: list(values) for name, values in kept["rewards"].items()},
                list(kept["advantages"]),
                marked,
                step=self.state.global_step,
                most=self._completions_to_print,
                extra={name: list(values) for name, values in kept["extra"].items()},
                below=health(logs),
                viewers=list(self._viewers),
            ),
            crop=False,
        )

    def _read_metrics(self, steps: int) -> dict[str, float]:
        mode = "train" if self.model.training else "eval"
        found = self._channel_metrics[mode].read(steps, lambda own: gather_object([own]))
        sites = self._driver.sites if self._driver is not None else None
        if mode == "train" and sites is not None and sites.check.mode != "off":
            counts: Counter[tuple[str, str]] = Counter()
            for of_rank in gather_object([dict(sites.check.counts)]):
                counts.update(of_rank)
            found |= acceptance(counts)
        return found if mode == "train" else {f"eval_{name}": value for name, value in found.items()}

    # Episodes that were lost

    def _calculate_rewards(self, *arguments: Any) -> torch.Tensor:
        """Return TRL's rewards ``[B * processes, functions]`` with NaN for lost episodes."""
        rewards: torch.Tensor = super()._calculate_rewards(*arguments)
        runners = self._runners()
        if runners is not None:
            lost = gather_object([runner is not None and runner.lost is not None for runner in runners])
            if any(lost):
                rewards[torch.tensor(lost, device=rewards.device)] = torch.nan
        return rewards

    def _leave_out_lost(self, batch: dict[str, Any], runners: list[EpisodeRunner | None]) -> None:
        """Take lost episodes out of the batch: set their rows of ``tool_mask`` to 0 and count its items anew.

        A zero advantage alone would leave their tokens in the KL term. The share of lost episodes over all ranks is
        added to the metrics as ``episodes/lost``.

        Raises:
            ServiceError: Every episode of `LOST_BATCHES` batches in a row was lost.
        """
        lost = torch.tensor([runner is not None and runner.lost is not None for runner in runners])
        whys = gather_object([runner.lost if runner is not None else None for runner in runners])
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
                f"every episode of {self._lost_batches} batches in a row was lost, the last one by {whys[-1]}: "
                "look at the server, then resume from the last checkpoint"
            )
