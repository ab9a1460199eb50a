"""Projects as the subject of an ablation: taught policies, a terminal with recorded answers, evaluation."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl.chat_template_utils import parse_response

from errata_protocol.errors import ServiceError
from errata_trainer.assembly.counterfactual import calls_of
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.hints import TemplateHinter
from errata_trainer.recipes.trl import environment_factory
from errata_trainer.tiny import END, START

from .memo import Memo
from .project_lessons import conversations, tokenizer_of
from .projects import Habits, Project, Split, hint_of
from .records import Evaluation
from .teachers import StepTeachers
from .warmup import BATCH, HEADER, opening, taught

TURNS = 2
TURN_TOKENS = 32


class ProjectSubject:
    """One project and one policy as a `Subject` for `train`.

    Args:
        project: The tasks.
        habits: Behaviour that the policy is taught.
        directory: Directory for the policy and the terminal's recorded answers.
        url: URL of a terminal that has the tasks.
        warmup_steps: Number of training steps in which the policy is taught.
        warmup_batch: Conversations of each of these steps.
        say: Called with each line of progress.
    """

    def __init__(
        self,
        project: Project,
        habits: Habits,
        directory: Path,
        url: str,
        *,
        warmup_steps: int,
        warmup_batch: int = BATCH,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.project, self.habits = project, habits
        self.tokenizer = tokenizer_of()
        self.policy = taught(
            lambda: conversations(project, habits, project.seed),
            self.tokenizer,
            directory / "policies",
            steps=warmup_steps,
            seed=project.seed,
            batch=warmup_batch,
            say=say,
        )
        played = environment_factory(url, tools=["run"], task_columns=["task_id"])
        answers = directory / "answers" / f"project-{project.seed}.jsonl"
        self.memo = Memo(played._connect, lambda task: project.task(task["task_id"]).files, answers)
        self.environment = type("TerminalEnvironment", (played,), {"_connect": staticmethod(self.memo.session)})

    def trained(self, seed: int) -> dict[str, Any]:
        """Return a copy of the taught policy, the tasks for training and the environment; the seed is the trainer's."""
        del seed
        return {
            "model": self.model(),
            "processing_class": self.tokenizer,
            "train_dataset": Dataset.from_list(self.project.rows("train")),
            "environment_factory": self.environment,
        }

    def model(self) -> Any:
        """Return a copy of the taught policy in float32."""
        return Qwen3ForCausalLM.from_pretrained(self.policy)

    def pairs(self, seed: int, *, at_random: bool = False) -> StepTeachers:
        """Return newly drawn teachers."""
        return StepTeachers(self.project, seed, at_random=at_random)

    def evaluate(self, model: Any, split: Split, seed: int) -> Evaluation:
        """Have a policy play each task of a split once, sampling as in training."""
        runners = [self.environment()._runner for _ in self.project.tasks[split]]
        return evaluate(model, self.tokenizer, runners, self.project, split, seed)

    def close(self) -> None:
        """Close the sessions in the terminal and save the recorded answers."""
        self.memo.close()


def evaluate(
    model: Any, tokenizer: Any, runners: Sequence[EpisodeRunner], project: Project, split: Split, seed: int
) -> Evaluation:
    """Have a policy play each task of a split once, at temperature 1.

    Args:
        model: The policy; its mode (training or evaluation) is restored.
        tokenizer: The policy's tokenizer.
        runners: Episode runners, one for each task.
        project: The tasks.
        split: Name of the split.
        seed: Seed of sampling.

    Raises:
        ServiceError: An episode was lost.
    """
    tasks = project.tasks[split]
    contexts: list[list[int]] = []
    for task, runner in zip(tasks, runners, strict=True):
        message = {"role": "user", "content": runner.reset({"task_id": task.task_id})}
        contexts.append(tokenizer.encode(opening([message]) + HEADER, add_special_tokens=False))
    was_training = model.training
    model.eval()
    running = list(range(len(tasks)))
    silent = 0
    for turn in range(TURNS):
        said = sampled(model, tokenizer, [contexts[row] for row in running], 2 * seed + turn, TURN_TOKENS)
        still = []
        for row, ids in zip(running, said, strict=True):
            calls = calls_of(parse_response(tokenizer, ids, prefix=contexts[row]))[:1]
            text = None
            for name, arguments in calls:
                if name in runners[row].environment.tools:
                    try:
                        text = runners[row].call(name, arguments)
                    except TypeError as error:
                        text = str(error)
            if text is None:
                silent += 1
                continue
            result = f"\n{START}tool\n{text}{END}\n{HEADER}"
            contexts[row] = contexts[row] + ids + tokenizer.encode(result, add_special_tokens=False)
            still.append(row)
        running = still
        if not running:
            break
    model.train(was_training)
    rewards, marks, acted = [], Counter({"no call": silent}), 0
    for runner in runners:
        made = len(runner.played)
        reward = runner.finish()
        if reward is None:
            raise ServiceError(f"an episode was lost: {runner.lost}")
        rewards.append(reward)
        acted += made
        for call in runner.played[:made]:
            if call.marker is not None and call.marker.severity != "warning":
                marks[call.marker.hint_template_key or ""] += 1
    failed = sum(number for key, number in marks.items() if key != "no call")
    return Evaluation(split, sum(rewards) / len(rewards), acted, failed, dict(marks), len(tasks))


def hinted_success(model: Any, tokenizer: Any, project: Project, *, turn: int = 0, hinted: bool = True) -> float:
    """Return the share of right calls of a policy after a hint about the value that it believes in.

    One call is sampled for each training task at temperature 1; nothing is played.

    Args:
        model: The policy.
        tokenizer: The policy's tokenizer.
        project: The tasks.
        turn: Turn that follows the hint; the turn before it failed with the believed value.
        hinted: Give the hint.
    """
    hinter = TemplateHinter()
    contexts, right = [], []
    for task in project.tasks["train"]:
        text = opening([{"role": "user", "content": task.instruction}])
        for step in task.steps[:turn]:
            tried = project.beliefs[step.operation]
            said, status = project.complaint(step.operation, tried)
            call = json.dumps({"name": "run", "arguments": {"command": step.command(tried)}})
            text += f"{HEADER}<tool_call>{call}</tool_call>{END}\n{START}tool\n[stderr]\n{said}\n[exit {status}]{END}\n"
        step = task.steps[turn]
        value = project.conventions[step.operation]
        if hinted:
            hint = hint_of(step, project.beliefs[step.operation], value, hinter)
            text += f"{START}user\n{hint}{END}\n"
        contexts.append(tokenizer.encode(text + HEADER, add_special_tokens=False))
        right.append(("run", {"command": step.command(value)}))
    model.eval()
    said_ids = sampled(model, tokenizer, contexts, project.seed, TURN_TOKENS)
    made = [
        calls_of(parse_response(tokenizer, ids, prefix=context))
        for context, ids in zip(contexts, said_ids, strict=True)
    ]
    return sum(calls[:1] == [one] for calls, one in zip(made, right, strict=True)) / len(right)


def sampled(
    model: Any, tokenizer: Any, contexts: Sequence[Sequence[int]], seed: int, max_new_tokens: int
) -> list[list[int]]:
    """Return one turn for each context, sampled at temperature 1; contexts are padded on the left."""
    width = max(map(len, contexts))
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(row)) + list(row) for row in contexts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in contexts])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made = model.generate(
            input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
            max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    return [[one for one in row if one != pad] for row in made[:, width:].tolist()]
