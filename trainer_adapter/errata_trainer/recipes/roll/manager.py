"""`TrajectoryEnvManager`: ROLL's environment manager with a trajectory as one sample, and lost episodes left out.

In ROLL's configuration it is the ``env_manager_cls`` of an environment; importing it registers `ErrataEnv` with gem as
``errata_env``, in each of ROLL's environment workers. `LostFilter` is the ``group_filter_cls`` beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.env_manager.agent_native_env_manager import AgentNativeStepEnvManager, GroupFilter
from roll.utils.functionals import pad_to_length
from roll.utils.import_utils import safe_import_class
from tensordict import TensorDict
from torch import Tensor

from errata_protocol.errors import InvalidRequest, ServiceError

from ...packing import NOT_SAMPLED
from . import env as _registered  # noqa: F401
from .rows import Row, settled, trajectory_rows

log = logging.getLogger("errata.trainer")

_BY_STEP = ("gigpo", "step_reinforce")
"""Estimators of ROLL that take each step for a sample."""


class TrajectoryEnvManager(AgentNativeStepEnvManager):  # type: ignore[misc]
    """Plays episodes as ROLL's manager does, and makes one sample of all turns that share their tokens.

    ``formulate_mode`` of the environment's configuration is ``traj``, the default, or ``step``: a sample of each turn,
    as ROLL's own manager makes them. In both, an episode that an infrastructure failure ended becomes a sample without
    a token to train on, marked with ``drop_flag``, and in a group of its own: its zero is in no group's mean.

    Samples of ``traj`` have two columns more: ``segment_ids`` ``[B, T]``, the turn that sampled a token or -1, and
    ``step_rewards`` ``[B, T]``, the discounted return of the turn (``step_reward_gamma``). ROLL's own
    ``agentic_reinforce`` and ``ratio_type: segment`` find the turns by the mask.

    Args:
        worker_config: ROLL's configuration of the environment manager.
        pipeline_config: ROLL's configuration of the pipeline.
        env_config: ROLL's configuration of the environment.
        more: ROLL's other arguments.
        named: ROLL's other arguments.

    Raises:
        InvalidRequest: ``formulate_mode`` or a discount has a value that it cannot have; the estimator takes each step
            for a sample, and the mode is ``traj``; or lost episodes would count in a mean, because ``group_filter_cls``
            is not `LostFilter`.
    """

    def __init__(self, worker_config: Any, pipeline_config: Any, env_config: Any, *more: Any, **named: Any) -> None:
        super().__init__(worker_config, pipeline_config, env_config, *more, **named)
        self.formulate_mode = self.cfg_template.get("formulate_mode", "traj")
        if self.formulate_mode not in ("traj", "step"):
            raise InvalidRequest(f"formulate_mode is {self.formulate_mode!r}: it has to be traj or step")
        if self.formulate_mode == "traj" and pipeline_config.adv_estimator in _BY_STEP:
            raise InvalidRequest(
                f"adv_estimator {pipeline_config.adv_estimator} takes each step for a sample, and formulate_mode: traj "
                "makes one of all: set adv_estimator: agentic_reinforce, with gamma in place of step_reward_gamma, or "
                "formulate_mode: step"
            )
        for name in ("gamma", "step_reward_gamma"):
            if not 0.0 <= getattr(pipeline_config, name) <= 1.0:
                raise InvalidRequest(f"{name} is {getattr(pipeline_config, name)}: it has to lie in [0, 1]")
        norm = getattr(pipeline_config, "reward_normalization", None)
        kinds = {getattr(norm, name, None) for name in ("norm_mean_type", "norm_std_type")} - {None}
        self._has_baseline = getattr(norm, "norm_mean_type", None) is not None
        self._has_logprobs: bool | None = None
        self._has_warned = False
        chosen = getattr(worker_config, "group_filter_cls", None)
        if chosen is not None and not _drops_lost(chosen):
            problem = f"group_filter_cls {chosen} lets lost episodes through: set {__name__}.LostFilter"
            if "batch" in kinds or (kinds and norm.grouping != "traj_group_id"):  # type: ignore[union-attr]
                raise InvalidRequest(
                    f"{problem}; with this reward_normalization their zero would be in the others' mean"
                )
            log.warning(problem)

    def update_step(self, global_step: int) -> None:
        """Take the number of the training step, which becomes a label of the episodes that begin from now on.

        Args:
            global_step: Number of the step.
        """
        super().update_step(global_step)
        self.env.training_step = global_step

    def step(self, llm_output: DataProto) -> Any:
        """Play a turn, or end the episode for ROLL's reason if no turn was sampled, e.g. because the context is full.

        Args:
            llm_output: ROLL's answer of the model; without ``responses`` if the model was not asked.
        """
        if llm_output.batch is not None and "responses" not in llm_output.batch.keys():  # noqa: SIM118
            llm_output = SimpleNamespace(batch=None)  # ROLL asks for None, which a DataProto's batch no longer is
        return super().step(llm_output)

    def formulate_rollouts(self, rollout_cache: Any) -> DataProto:
        """Return the samples of a trajectory.

        Args:
            rollout_cache: ROLL's record of the trajectory.
        """
        history = rollout_cache.history
        lost = next((one["lost"] for one in history if one.get("lost")), None)
        if lost is not None or "response_ids" not in history[0]:
            self.failure_mode = "no turn was sampled" if lost is None else f"lost: {lost}"
            return self._without_tokens(rollout_cache, lost)
        sampled = settled(history)
        self._has_logprobs = all("infer_logprobs" in one for one in sampled)
        by_step = super().formulate_rollouts(rollout_cache)
        if self.formulate_mode == "step":
            return by_step
        rows = trajectory_rows(
            sampled,
            max_tokens=self.pipeline_config.sequence_length,
            gamma=1.0 if self._has_baseline else self._row_gamma,
            step_gamma=self.pipeline_config.step_reward_gamma,
        )
        if not rows:
            self.failure_mode = "no turn fits into sequence_length"
            return self._without_tokens(rollout_cache, None)
        if len(rows) == len(by_step) > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                "no two of an episode's %d turns share a sample: the chat template shows earlier turns in other tokens "
                "than they were sampled in, as Qwen3's does; docs/roll.md names some that do not",
                len(rows),
            )
        made = DataProto(
            batch=TensorDict(self._columns(rows), batch_size=len(rows)),
            non_tensor_batch={
                name: column[[row.turns[0] for row in rows]] for name, column in by_step.non_tensor_batch.items()
            },
        )
        objects = {
            name: by_step.non_tensor_batch[name] for name in ("step_scores", "trajectory_data", "messages", "tools")
        }
        made.non_tensor_batch["step_scores"] = _objects(objects.pop("step_scores"), [list(row.rewards) for row in rows])
        for name, column in objects.items():
            made.non_tensor_batch[name] = _objects(column, [None] * (len(rows) - 1) + [column[-1]])
        made.meta_info = by_step.meta_info
        tag = rollout_cache.tag
        made.meta_info["metrics"] |= {
            f"env/{tag}/samples": float(len(rows)),
            f"env/{tag}/turns_left_out": float(len(by_step) - sum(len(row.turns) for row in rows)),
        }
        return made

    def create_placeholder_rollout(self, episode_id: Any) -> DataProto:
        """Return a sample without a token to train on, for an episode that never began.

        Args:
            episode_id: ROLL's number of the episode.
        """
        made = super().create_placeholder_rollout(episode_id)
        group = made.non_tensor_batch["traj_group_id"]
        made.non_tensor_batch["traj_group_id"] = _objects(group, [f"{group[0]}_lost_{self.env_config['env_id']}"])
        if self.formulate_mode == "traj":
            shape = made.batch["input_ids"].shape
            made.batch["segment_ids"] = torch.full(shape, NOT_SAMPLED)
            made.batch["step_rewards"] = torch.zeros(shape)
        if self._has_logprobs is False:  # columns have to be the same in a batch
            made.batch.pop("infer_logprobs")
        made.meta_info |= {"drop_flag": True, "lost": self.failure_mode}
        made.meta_info["metrics"] = {f"env/{self.env_config['tag']}/lost": 1.0}
        return made

    def _without_tokens(self, rollout_cache: Any, lost: str | None) -> DataProto:
        made = self.create_placeholder_rollout(self.episode_id)
        if lost is None:  # the episode counts, though nothing of it can be trained
            score = float(sum(one.get("reward", 0.0) for one in rollout_cache.history))
            for name in ("episode_scores", "step_scores"):
                made.non_tensor_batch[name] = _objects(made.non_tensor_batch["tags"], [score])
            made.batch["scores"][0, -1] = score
            made.meta_info["drop_flag"] = False
            made.meta_info["metrics"] = {f"env/{rollout_cache.tag}/lost": 0.0}
        else:
            # ROLL names the group of a finished trajectory by this, after this method returns.
            rollout_cache.group_id = f"{rollout_cache.group_id}_lost_{rollout_cache.env_id}"
        return made

    @property
    def _row_gamma(self) -> float:
        """Discount that ROLL's estimator applies from turn to turn of a row."""
        by_turn = self.pipeline_config.adv_estimator == "agentic_reinforce"
        return float(self.pipeline_config.gamma) if by_turn else 1.0

    def _columns(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return the columns of the rows, padded at the end."""
        length = self.pipeline_config.sequence_length

        def padded(values: Sequence[Sequence[Any]], kind: torch.dtype, pad: float = 0) -> Tensor:
            return torch.cat(
                [pad_to_length(torch.tensor([list(one)], dtype=kind), length=length, pad_value=pad) for one in values]
            )

        attended = padded([[1] * len(row.ids) for row in rows], torch.long)
        columns = {
            "input_ids": padded([row.ids for row in rows], torch.long, self.tokenizer.pad_token_id),
            "attention_mask": attended,
            "position_ids": (attended.cumsum(-1) - 1) * attended,
            "response_mask": padded([[one != NOT_SAMPLED for one in row.segments] for row in rows], torch.bool),
            "prompt_mask": padded([[place < row.first for place in range(len(row.ids))] for row in rows], torch.bool),
            "scores": padded([[0.0] * (len(row.ids) - 1) + [row.score] for row in rows], torch.float),
            "segment_ids": padded([row.segments for row in rows], torch.long, NOT_SAMPLED),
            "step_rewards": padded([row.returns for row in rows], torch.float),
        }
        if all(row.logprobs is not None for row in rows):
            columns["infer_logprobs"] = padded([row.logprobs or () for row in rows], torch.float)[:, 1:]
        return columns


class LostFilter(GroupFilter):  # type: ignore[misc]
    """Drops each group with a lost episode; ROLL plays another in its place.

    ROLL's own filters drop none of them, or half at most. This one ends the run where so many groups in a row have a
    lost episode as four rounds of all groups are, or 16 if that is more.

    Args:
        config: ROLL's configuration of the pipeline.
        env_manager_config: ROLL's configuration of the environment manager.
        mode: ROLL's mode, ``train`` or ``val``.
    """

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        super().__init__(config, env_manager_config, mode)
        self._most = max(16, 4 * env_manager_config.num_env_groups)
        self._in_a_row = 0

    def filter(self, group_id: int, episode_id: int, group: list[DataProto | None]) -> bool:
        """Return whether a group is dropped.

        Args:
            group_id: ROLL's number of the group.
            episode_id: ROLL's number of the episode.
            group: Samples of each episode of the group; None of one that was not played any more.

        Raises:
            ServiceError: Too many groups in a row have a lost episode.
        """
        lost = [one.meta_info for one in group if one is not None and one.meta_info.get("drop_flag", False)]
        self.global_filter_stats["total"] += 1
        self.global_filter_stats["filtered"] += bool(lost)
        self._in_a_row = self._in_a_row + 1 if lost else 0
        if self._in_a_row >= self._most:
            raise ServiceError(
                f"{self._in_a_row} groups in a row have a lost episode, at last: {lost[-1].get('lost', 'unknown')}. "
                "Look after the environment's server, and start again"
            )
        return bool(lost)


def _drops_lost(name: str) -> bool:
    """Return whether the class of a group filter is `LostFilter` or a subclass."""
    found = safe_import_class(name)
    return isinstance(found, type) and issubclass(found, LostFilter)


def _objects(like: Any, values: Sequence[Any]) -> Any:
    """Return values as a column of objects like one of ROLL's. (An array made of lists would have two dimensions.)"""
    column = like[[0] * len(values)]
    for place, value in enumerate(values):
        column[place] = value
    return column
