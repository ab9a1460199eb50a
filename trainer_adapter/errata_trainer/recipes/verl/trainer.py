"""`with_channels`: VeRL's V1 trainers with channels 2 and 3. What they find in a batch, `BatchChannels` finds.

A batch passes here in this order, inside VeRL's own step:

    sample              records are read, hints made, teachers asked: the rollout servers are awake until it returns
    _compute_advantage  columns are put for all rows, after VeRL has filled the batch up; the estimator gets them
    _update_actor       the weights of the step go to the actor, which has the losses
    step                metrics of all processes are combined; `_consume_sync_metrics` hands them to VeRL's log
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from rich.console import Console
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.experimental.separation.engine_workers import DetachActorWorker
from verl.trainer.ppo.utils import Role
from verl.utils.config import omega_conf_to_dataclass

from ...assembly.teacher_pairs import TeacherPairs
from ...episodes.tools import schema_of
from ...monitoring.metrics import combined
from ...monitoring.progress import health, progress_line
from ...rollouts.rollout import DpoPair
from .actor import ErrataActorWorker, ErrataDetachActorWorker
from .agent_loop import played_of
from .batch_channels import BatchChannels
from .columns import (
    ALPHA,
    BETA,
    ERROR_MASK,
    ITEMS_COLUMN,
    OWN_COLUMN,
    PAIRS_COLUMN,
    TEACHER_ACTIONS,
    TEACHER_LOGPROBS,
    TURN_SCORES,
    WEIGHTS,
    pairs_of,
    response_columns,
    text_of,
)
from .estimator import Shaping, shaping
from .options import channel_options_of, options_of
from .records import HANDED_OVER, Row
from .sampling import WatchedBuffer
from .scoring import RequestLimits, Scorer
from .tool_calls import TurnParser, tool_parser_of

STATE = "errata"
"""Folder of a checkpoint of VeRL with the state of the channels."""
ACTOR = "actor"
"""Folder in `STATE` with what the actor's processes save."""

log = logging.getLogger("errata.trainer")


def with_channels(base: type) -> type:
    """Return one of VeRL's V1 trainers with channels 2 and 3.

    Args:
        base: Trainer class of a mode, as VeRL's ``get_trainer_cls`` returns it.
    """
    return type(f"{base.__name__}WithChannels", (ChannelTrainer, base), {})


class ChannelTrainer:
    """What `with_channels` puts before one of VeRL's trainer classes."""

    config: Any
    global_steps: int
    actor_rollout_wg: Any
    replay_buffer: Any
    channels: BatchChannels

    def _init_resource_pool_mgr(self) -> None:
        """Have the actor's processes be of the class with the losses of the channels."""
        super()._init_resource_pool_mgr()  # type: ignore[misc]
        mapping: dict[Any, Any] = self.role_worker_mapping  # type: ignore[attr-defined]
        for role in (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef):
            if role in mapping:
                of_verl = mapping[role].__ray_metadata__.modified_class
                detached = issubclass(of_verl, DetachActorWorker)
                mapping[role] = ray.remote(ErrataDetachActorWorker if detached else ErrataActorWorker)

    def _load_checkpoint(self) -> None:
        """Load VeRL's checkpoint, and remember where the state of the channels is."""
        super()._load_checkpoint()  # type: ignore[misc]
        self._resumed: Path | None = None
        if self.global_steps:
            trainer = self.config.trainer
            folder = (
                Path(trainer.resume_from_path)
                if trainer.resume_mode == "resume_path"
                else Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
            )
            self._resumed = (folder / STATE).absolute()

    def on_init_end(self) -> None:
        """Begin the channels, or go on from the checkpoint."""
        super().on_init_end()  # type: ignore[misc]
        config, options = self.config, channel_options_of(self.config)
        episodes = options_of(config)
        rollout = config.actor_rollout_ref.rollout
        resumed = self._resumed if self._resumed is not None and self._resumed.is_dir() else None
        if self._resumed is not None and resumed is None:
            log.warning("the checkpoint has no state of the channels (%s): they begin anew", self._resumed)
        losses = options.of_losses(float(rollout.temperature))
        self.actor_rollout_wg.begin_channels(losses, str(resumed / ACTOR) if resumed is not None else None)
        reference = self.actor_rollout_wg.channel_reference()[0] if losses.has_pairs else ""
        tokenizer: Any = self.tokenizer  # type: ignore[attr-defined]
        played = played_of(episodes)
        turns = TurnParser(
            tool_parser_of(episodes.tool_format, rollout, tokenizer),
            tokenizer,
            [schema_of(played.environment.tools[name]) for name in played.tools],
        )
        longest = rollout.get("max_model_len")
        # Where rollout servers are apart from the trainer (separate_async), those with the trainer sleep as it trains.
        servers = getattr(self, "standalone_server_manager", None) or self.llm_server_manager  # type: ignore[attr-defined]
        self.scorer = Scorer(
            servers.get_client(),
            turns,
            sampling_params={
                "temperature": rollout.temperature,
                "top_p": rollout.top_p,
                "top_k": rollout.top_k,
                "repetition_penalty": 1.0,
                "max_tokens": episodes.turn_tokens or int(rollout.response_length),
            },
            limits=RequestLimits(longest=int(longest) - 1 if longest else None, generate_s=episodes.call_s),
        )
        self.channels = BatchChannels(
            options,
            played,
            tokenizer=tokenizer,
            end_ids=sorted(turns.ends),
            model_config=omega_conf_to_dataclass(config.actor_rollout_ref.model).hf_config,
            scorer=self.scorer,
            referred=self._referred,
            reference=reference,
            has_logprobs=bool(rollout.calculate_log_probs),
            steps=int(self.total_training_steps),  # type: ignore[attr-defined]
        )
        if resumed is not None:
            self.channels.state.restore(resumed)
        self._found: dict[str, float] = {}
        self._optimizer_steps = 0

    def _referred(self, pairs: Sequence[DpoPair]) -> list[DpoPair]:
        """Return pairs with the reference's log-probabilities, which the actor's processes compute."""
        return list(pairs_of(self.actor_rollout_wg.refer_channels(text_of(pairs))[0]))

    def fit(self, agent_loop_manager: Any) -> None:
        """Train, and close what the channels opened: the teachers' last votes are posted."""
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
        finally:
            self.scorer.close()
            pairs = self.channels.options.pairs
            if isinstance(pairs, TeacherPairs):
                pairs.close()
                pairs.pool.close()

    # The batch

    def _build_replay_buffer(self) -> Any:
        """Return VeRL's replay buffer, watched, whose batches of training pass through the channels."""
        buffer = super()._build_replay_buffer()  # type: ignore[misc]
        config = self.config
        self.watched = WatchedBuffer(
            buffer,
            workers=lambda: self.agent_loop_manager,  # type: ignore[attr-defined]
            resubmit=lambda: self._add_batch_to_generate(),  # type: ignore[attr-defined]
            sampled=lambda batch: self.channels.read(self._rows_of(batch), self.global_steps - 1),
            count_lost=lambda lost: self.channels.count_lost(lost),
            count=lambda name, value: self.channels.count_failed(name, value),
            batch_rollouts=int(config.data.train_batch_size) * int(config.actor_rollout_ref.rollout.n),
        )
        return buffer

    def _rows_of(self, batch: Any) -> list[Row]:
        has_logprobs = bool(self.config.actor_rollout_ref.rollout.calculate_log_probs)
        fields = ["prompts", "responses", "response_mask", "extra_fields", *["rollout_log_probs"] * has_logprobs]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        columns = [data[name].unbind() for name in ("prompts", "responses", "response_mask")]
        logprobs = data["rollout_log_probs"].unbind() if has_logprobs else [None] * len(batch.keys)
        return [
            Row(
                key,
                key.split("_")[0],
                prompt.tolist(),
                response.tolist(),
                mask.tolist(),
                None if of_row is None else of_row.tolist(),
                _plain(extra).get(HANDED_OVER),
            )
            for key, prompt, response, mask, of_row, extra in zip(
                batch.keys, *columns, logprobs, list(data["extra_fields"]), strict=True
            )
        ]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Put the columns of all rows, and give the estimator what it adds to the advantages."""
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask", "old_log_probs"]
        )
        lengths = [len(row) for row in data["response_mask"].unbind()]
        rows = [self.channels.of_row(key) for key in batch.keys]
        by_estimator = self.channels.options.form == "estimator"
        columns = response_columns(
            [row.rollout for row in rows],
            [row.items for row in rows],
            [row.logprobs for row in rows] if by_estimator else None,
            lengths=lengths,
        )
        if self.channels.scores_turns:
            columns[TURN_SCORES] = [
                row.turn_scores or [0.0] * length for row, length in zip(rows, lengths, strict=True)
            ]
        nested = {
            name: torch.nested.as_nested_tensor([torch.tensor(of) for of in values], layout=torch.jagged)
            for name, values in columns.items()
        }
        texts: dict[str, list[str]] = {}
        if self.channels.driver.pair_source is not None:
            texts[TEACHER_ACTIONS] = [json.dumps(row.teacher_actions) for row in rows]
        if not by_estimator:
            texts |= {
                ITEMS_COLUMN: [text_of(row.items) for row in rows],
                PAIRS_COLUMN: [text_of(row.pairs) for row in rows],
                OWN_COLUMN: [json.dumps(row.own) for row in rows],
            }
        fields = TensorDict(
            {**nested, **{name: NonTensorStack(*map(NonTensorData, of)) for name, of in texts.items()}},
            batch_size=[len(batch.keys)],
        )
        tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        with shaping(self._shaping(nested, data["old_log_probs"])) as shaped:
            batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        self.channels.count_failed("groups/of_one", shaped.alone)
        return batch

    def _shaping(self, columns: dict[str, Any], old_logprobs: Any) -> Shaping:
        def padded(name: str) -> torch.Tensor | None:
            return columns[name].to_padded_tensor(0.0) if name in columns else None

        step, channels = self.global_steps - 1, self.channels
        scores = padded(TURN_SCORES) if channels.scores_turns else None
        if channels.options.form == "loss":
            return Shaping(turn_scores=scores, beta=channels.options.settings.prm_weight)
        return Shaping(
            error_mask=padded(ERROR_MASK),
            teacher_logprobs=padded(TEACHER_LOGPROBS),
            old_logprobs=old_logprobs.to_padded_tensor(0.0),
            weights=padded(WEIGHTS),
            turn_scores=scores,
            alpha=channels.alpha(step),
            beta=channels.beta(step),
        )

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Give the actor the weights of the step, and count its optimizer steps."""
        channels, step = self.channels, self.global_steps - 1
        if channels.options.form == "loss":
            batch.extra_info.update({ALPHA: channels.alpha(step), BETA: channels.beta(step)})
        actor, rollout = self.config.actor_rollout_ref.actor, self.config.actor_rollout_ref.rollout
        self._optimizer_steps += len(batch.keys) // (actor.ppo_mini_batch_size * rollout.n) * actor.ppo_epochs
        return super()._update_actor(batch, metrics)  # type: ignore[misc]

    # The log

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> Any:
        """Make one of VeRL's steps, and combine the metrics of all processes after it."""
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        channels = self.channels
        taken = [channels.metrics.take(), *self.actor_rollout_wg.take_channel_metrics()]
        found = combined(taken, max(1, self._optimizer_steps))
        self._optimizer_steps = 0
        found |= channels.taken_lost(sum(not tag.get("is_padding", False) for tag in batch.tags))
        found |= channels.acceptance()
        channels.watch.see(found)
        if channels.options.settings.lower_dose:
            found["sdpo/dose"] = channels.watch.dose
        self._found = found
        self._show_completions(batch, found)
        if channels.options.settings.progress:
            print(progress_line(self.global_steps, found, channels.steps, channels.eid), flush=True)
        return batch

    def _consume_sync_metrics(self) -> dict[str, Any]:
        """Return VeRL's metrics with those of the channels, past VeRL's reductions, which go by a metric's name."""
        found, self._found = self._found, {}
        return {**super()._consume_sync_metrics(), **found}  # type: ignore[misc]

    def _show_completions(self, batch: Any, found: Mapping[str, float]) -> None:
        most = self.channels.options.completions
        if most == 0:
            return
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages", "response_mask"]
        )
        advantages = {}
        for key, advantage, mask in zip(
            batch.keys, data["advantages"].unbind(), data["response_mask"].unbind(), strict=True
        ):
            advantages[key] = float((advantage * mask).sum() / mask.sum().clamp(min=1))
        table = self.channels.table(advantages, step=self.global_steps, most=most, below=health(found))
        Console().print(table, crop=False)

    # Checkpoints

    def _save_checkpoint(self) -> None:
        """Save the channels, then what VeRL saves: it names a checkpoint the latest when it is whole."""
        folder = (Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}" / STATE).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        self.channels.state.save(folder)
        self.actor_rollout_wg.save_channels(str(folder / ACTOR))
        super()._save_checkpoint()  # type: ignore[misc]


def _plain(value: Any) -> dict[str, Any]:
    found: Any = getattr(value, "data", value)
    return found if isinstance(found, dict) else {}
