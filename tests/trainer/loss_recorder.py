"""Has TRL's trainer play scripted episodes, and keeps the batch and the channels' losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import recorded_losses
import torch
from datasets import Dataset
from recorded_losses import INITIAL, STUDENT, Recorded, measured, with_weights
from scripted import Scripted, call, config
from trl import GRPOTrainer

from errata_trainer import DpoPair, Rollout
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.episodes.tools import of_spec
from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import tiny_model
from tests.environments.shelf import SPEC

EPSILON = 1e-4
"""What TRL adds to the standard deviation of a group's rewards."""

RIGHT, WRONG = call("submit", word="owl"), call("submit", word="elk")
NO_SITE = [call("read", path="red"), RIGHT, "done"]
ONE_SITE = [call("read", path="green"), RIGHT, "done"]
TWO_SITES = [call("read", path="green"), call("read", path="blue"), WRONG, "I am done with it"]
FOUR_SITES = [*[call("read", path=path) for path in ("green", "blue", "gray", "x")], WRONG, "done"]
LONG = ["Let me see. " * 9 + call("read", path="brown"), WRONG, "That was not it. " * 5]
CUT = [call("read", path="green"), "word " * 40 + call("read", path="blue")]
LOST = [call("read", path="green"), call("read", path="broken"), "hm"]


@dataclass(frozen=True)
class Case:
    """A batch to play.

    Attributes:
        scripts: Turns of each row.
        group: Number of rows of a group.
        pairs: Rows whose last turn is rejected in a pair.
        elsewhere: Whether the state of every other pair is in no row.
        length: Most tokens of a completion.
        options: Options of the channels, and the temperature.
        settings: Other options of the channels.
    """

    scripts: Sequence[Sequence[str]]
    group: int = 2
    pairs: Sequence[int] = ()
    elsewhere: bool = False
    length: int = 300
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


CASES = {
    "no_site": Case([NO_SITE, [WRONG, "no"]] * 2, pairs=[0, 1, 3], settings={"teacher": "live"}),
    "one_site": Case([NO_SITE, [WRONG, "no"], ONE_SITE, NO_SITE], settings={"teacher": "initial"}),
    "many_sites": Case(
        [TWO_SITES, ONE_SITE, NO_SITE, FOUR_SITES, ONE_SITE, TWO_SITES, LONG, NO_SITE],
        group=4,
        pairs=[0, 1, 2, 5, 6],
        options={"jsd_beta": 0.3, "token_clip": 0.02},
        settings={"teacher": "ema"},
    ),
    "padding": Case(
        [LONG, [RIGHT, "no"], ONE_SITE, FOUR_SITES],
        pairs=[0, 2],
        elsewhere=True,
        options={"temperature": 0.8},
        settings={"teacher": "live"},
    ),
    "cut_turn": Case(
        [ONE_SITE, CUT, NO_SITE, TWO_SITES],
        pairs=[1, 2, 3],
        elsewhere=True,
        length=100,
        settings={"teacher": "initial"},
    ),
    "lost": Case(
        [ONE_SITE, LOST, TWO_SITES, NO_SITE, LOST, LOST, ONE_SITE, LOST], group=4, pairs=[0, 1, 2, 4, 6]
    ),
    "sampled_form": Case(
        [TWO_SITES, ONE_SITE, NO_SITE, LONG], pairs=[0, 3], settings={"teacher": "initial", "sdpo_form": "sampled"}
    ),
    "importance_weights": Case(
        [TWO_SITES, ONE_SITE, LONG, NO_SITE], options={"temperature": 1.3}, settings={"teacher": "live", "is_clip": 0.7}
    ),
    "other_options": Case(
        [TWO_SITES, ONE_SITE, NO_SITE, LONG],
        pairs=[0, 1, 3],
        options={"token_clip": 0.05, "jsd_beta": 1.0},
        settings={
            "clip_mode": "token", "dpo_loss": "sigmoid_norm", "dpo_nll": 0.2, "sdpo_targets": "calls",
            "support": "student", "tail": True, "temperature": 1.5, "top_k": 16,
        },
    ),
}  # fmt: skip


class Pairs(PairSource):
    """Rejects how the last turns of some rows begin, for an action of its own."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._rollouts: list[Rollout] = []

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        self._rollouts = list(rollouts)

    def sample(self, count: int, referred: Callable[[Any], list[DpoPair]]) -> list[DpoPair]:
        made = []
        for n, row in enumerate(self._case.pairs):
            rollout = self._rollouts[row]
            last = rollout.turns[-1]
            # Few tokens: a long action's log-probability is a large number, and float32 has no more digits for it.
            rejected = rollout.completion_ids[last.start : last.stop][:6]
            before = rollout.prompt_ids[:2] if self._case.elsewhere and n % 2 else ()
            context = (*before, *rollout.prompt_ids, *rollout.completion_ids[: last.start])
            made.append(DpoPair(context, (60 + n, 70, rejected[-1]), rejected, weight=0.5 + n))
        return referred(made)


class Recorder(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    """Keeps a batch and its rollouts, and the channels' part of the loss with its gradient."""

    batch: dict[str, Any]
    rollouts: list[Rollout]
    part: float
    gradients: dict[str, torch.Tensor]

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        # Not before training has begun: until then a teacher with weights of its own follows the student.
        with_weights(self.accelerator.unwrap_model(self.model), STUDENT)
        read = self._driver.rollouts

        def kept(*given: Any) -> list[Rollout]:
            self.rollouts = read(*given)
            return self.rollouts

        self._driver.rollouts = kept
        self.batch = super()._generate_and_score_completions(inputs)
        self._driver.rollouts = read
        if self.settings.is_clip is not None:  # as a batch has them from vLLM
            old = torch.zeros(self.batch["completion_ids"].shape)
            for row, rollout in enumerate(self.rollouts):
                length = len(rollout.completion_ids)
                made = -6.0 + 2.0 * torch.sin(torch.arange(length) * 1.3 + row)
                old[row, :length] = made
                self.rollouts[row] = replace(rollout, logprobs=tuple(made.tolist()))
            self.batch["sampling_per_token_logps"] = old
        return self.batch

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        plain = GRPOTrainer.compute_loss(self, model, inputs)
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        part = loss - plain
        self.part = float(part.detach())
        weights = dict(model.named_parameters())
        gradients = torch.autograd.grad(part, list(weights.values()), retain_graph=True)
        self.gradients = dict(zip(weights, gradients, strict=True))
        return loss


def record(case: Case, url: str, directory: Path) -> Recorded:
    """Return the batch of a case and what TRL's trainer has for it.

    Args:
        case: Batch to play.
        url: URL of a server of shelves.
        directory: Directory for what the trainer writes.
    """
    tokens = recorded_losses.tokenizer()
    given = {
        "alpha_sdpo": 0.7,
        "beta_replay": 0.4,
        "beta_dpo": 0.3,
        "jsd_beta": 0.5,
        "token_clip": 10.0,
        **case.options,
    }
    temperature = given.pop("temperature", 1.0)
    settings = {"divergence_guard": None, "dpo_reference": "initial", "teacher": "live", **case.settings}
    rows = [
        {"prompt": [{"role": "user", "content": text}], "place": "red", "word": "owl"}
        for text in ("A. ", "Find it. One of red, green, blue holds a word.")
    ]
    trainer = Recorder(
        model=with_weights(tiny_model(tokens), INITIAL),
        processing_class=tokens,
        args=config(
            directory,
            per_device_train_batch_size=len(case.scripts),
            num_generations=case.group,
            max_completion_length=case.length,
            learning_rate=0.0,
            temperature=temperature,
        ),
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment_factory(url, of_spec(SPEC)),
        pairs=Pairs(case),
        settings=ChannelSettings(**settings),
        **given,
    )
    trainer.script = lambda row, turn: case.scripts[row][turn]
    trainer.train()
    (log,) = [log for log in trainer.state.log_history if "loss" in log]
    batch, made = trainer.batch, trainer.rollouts
    advantages = batch["advantages"].double()
    groups = [row // case.group for row in range(len(made))]
    check_advantages(made, groups, advantages)
    return Recorded(
        options={**given, "temperature": temperature, "settings": settings},
        rollouts=tuple(
            replace(rollout, eid=None, lost=None if rollout.lost is None else "the machine failed") for rollout in made
        ),
        groups=tuple(groups),
        items=tuple(batch["sdpo_items"]),
        pairs=tuple(tuple(replace(pair, reference=None) for pair in row) for row in batch["dpo_pairs"]),
        advantages=tuple(advantages.tolist()),
        results={name: log[name] for name in RESULTS if name in log} | {"total": trainer.part, "epsilon": EPSILON},
        gradient=measured(trainer.model, trainer.gradients),
    )


RESULTS = ("loss/sdpo_kl", "loss/trace_replay_dpo", "sdpo/tokens", "sdpo/divergence", "dpo/pairs", "dpo/margin")
"""Metrics of a step that are kept."""


def check_advantages(rollouts: Sequence[Rollout], groups: Sequence[int], advantages: torch.Tensor) -> None:
    """Assert that advantages are what TRL makes of the rewards of the rollouts that were not lost."""
    for group in set(groups):
        rows = [n for n, rollout in enumerate(rollouts) if groups[n] == group and rollout.lost is None]
        rewards = torch.tensor([rollouts[n].reward for n in rows]).double()
        scaled = advantages[rows] * (rewards.std() + EPSILON) if len(rows) > 1 else advantages[rows]
        assert (scaled - (rewards - rewards.mean())).abs().max() < 1e-6
    assert not any(advantages[n] for n, rollout in enumerate(rollouts) if rollout.lost is not None)
