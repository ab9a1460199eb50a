"""TRL's own `SDPOTrainer` on the controlled family, as close to the other arms as it can be.

It has no tools, turns or environments, so it differs from the other arms:

- The prompt is the same, token for token. It samples the first turn only: there is no result of the tool and no closing
  text. An episode is one command, so no reward is lost by this.
- The reward is the terminal's: the command is played and graded there, one episode for each sample, as many as in the
  other arms.
- Feedback is a column of the data set, not a result of the rollout. For each task it is the hint about one wrong key,
  which was tried in the terminal before training. So every sample has feedback, also if no sample of the task failed.
  It follows the instruction in the user's message; the policy was taught to follow hints there too.
- Everything else is its default: the whole loss is distillation (``distillation_weight`` 1), by sampled tokens, from an
  EMA teacher, with a successful sibling as a demonstration where there is one.
"""

from __future__ import annotations

import random
import tempfile
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

from datasets import Dataset
from transformers import PrinterCallback
from trl import GRPOConfig

from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.hints import TemplateHinter

from .controlled import COPIES, BoxesSubject
from .plan import Arm, Plan
from .precondition import THREADS, met, play_turn, wrong_key
from .records import Batch, Run
from .training import DEFAULTS, Costs, Progress, Reporter, losses_of, teacher_costs

TEMPLATES = {"reprompt_template": "{prompt}{solution}{feedback}", "feedback_template": "\n{feedback_raw}"}
"""Its own end in a request that the tiny policy never read."""


class Player:
    """A reward function that plays each sample in the terminal.

    Args:
        runners: Episode runners.
        tokenizer: Tokenizer of the student.
        header_ids: Token ids before a sample.

    Attributes:
        batches: Results of the batches, in order.
    """

    __name__ = "terminal"

    def __init__(self, runners: list[EpisodeRunner], tokenizer: Any, header_ids: Sequence[int]) -> None:
        self._runners, self._tokenizer, self._header = runners, tokenizer, list(header_ids)
        self.batches: list[Batch] = []

    def __call__(self, *, completion_ids: list[list[int]], task_id: list[str], **_: Any) -> list[float | None]:
        """Return the reward of each sample."""
        count = len(self._runners)

        def play(runner: EpisodeRunner, places: range) -> list[tuple[int, float | None, bool, bool]]:
            found = []
            for place in places:
                runner.reset({"task_id": task_id[place]})
                reward = play_turn(runner, self._tokenizer, self._header, completion_ids[place])
                made = [call for call in runner.played if call.tool != runner.environment.closing_tool]
                failed = any(call.marker is not None and call.marker.severity != "warning" for call in made)
                found.append((place, reward, bool(made), failed))
            return found

        with ThreadPoolExecutor(count, "errata-player") as threads:
            shares = [range(n, len(task_id), count) for n in range(count)]
            played = sorted(one for share in threads.map(play, self._runners, shares) for one in share)
        rewards = [reward for _, reward, _, _ in played]
        counted = [one for one in played if one[1] is not None]
        acted, failed = sum(one[2] for one in counted), sum(one[3] for one in counted)
        self.batches.append(Batch(tuple(rewards), (acted,), (failed,), sum(map(len, completion_ids))))
        return rewards


def train_trl_sdpo(plan: Plan, subject: BoxesSubject, arm: Arm, seed: int, say: Reporter) -> Run:
    """Train TRL's `SDPOTrainer` with one seed, from the start; arguments and errors as `training.train`."""
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    began = time.monotonic()
    made = subject.trained(seed)
    tokenizer = subject.tokenizer
    runners = [made["environment_factory"]()._runner for _ in range(THREADS)]
    hinter, chance = TemplateHinter(), random.Random(seed)
    rows = []
    for row in subject.family.rows():
        task = {"task_id": row["task_id"]}
        text = runners[0].reset(task)
        feedback = met(runners[0], task, wrong_key(subject.family, row["box"], chance), hinter)
        prompt = [{"role": "system", "content": "run "}, {"role": "user", "content": text}]
        rows.append({"prompt": prompt, "privileged_context": feedback, "task_id": row["task_id"]})
    header = tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)
    player = Player(runners, tokenizer, header)
    shared = {field.name for field in fields(SDPOConfig)} & {field.name for field in fields(GRPOConfig)}
    given = {name: value for name, value in {**DEFAULTS, **plan.grpo}.items() if name in shared}
    with tempfile.TemporaryDirectory(prefix="errata-ablate-") as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = SDPOTrainer(
            model=made["model"],
            processing_class=tokenizer,
            args=SDPOConfig(
                **{**given, "output_dir": scratch, "seed": seed},
                include_environment_feedback=True,
                **TEMPLATES,
                diagnostics_warning_interval=0,
            ),
            train_dataset=Dataset.from_list(rows * COPIES),
            reward_funcs=[player],
        )
        costs = Costs(trainer.accelerator.unwrap_model(trainer.model))
        sample = trainer.sample_rollouts

        def sampled(*args: Any) -> Any:
            costs.sampling = True
            try:
                return sample(*args)
            finally:
                costs.sampling = False

        trainer.sample_rollouts = sampled
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Progress(say, player.batches))
        try:
            trainer.train()
        finally:
            for runner in runners:
                runner.close()
    history = trainer.state.log_history
    return Run(
        arm=arm.name,
        alpha_sdpo=0.0,
        beta_replay=0.0,
        seed=seed,
        plan=plan.digest(arm),
        batches=tuple(player.batches),
        losses=losses_of(history),
        costs={**costs.counts, "wall_s": time.monotonic() - began, **teacher_costs(history)},
    )
