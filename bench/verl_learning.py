"""Whether a tiny policy learns in VeRL's own trainer with the three channels, on a CPU: one policy, one seed.

    python bench/verl_learning.py                       # minutes, in VeRL's environment (make test-verl makes it)
    python bench/verl_learning.py --json out.json       # and write what was measured
    python bench/verl_learning.py --steps 2 --rollouts 16

It teaches the policy of `errata demo learning`, serves that demo's generated terminal tasks, and runs VeRL's V1 trainer
with Ray in a process of its own: 8 rollouts of each prompt, `grpo_composer`, channel 2, and channel 3 with the demo's
scripted teachers. The generator is tests/verl/sampling_plugin.py. VeRL's own validation plays each held-out task once,
before training and after it. It shows that the parts work together, and says nothing about models.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

if importlib.util.find_spec("verl") is None:
    print("left out: VeRL is missing (make test-verl)")
    sys.exit(0)

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]
warnings.filterwarnings("ignore", message=".* engine is not available")  # VeRL says so of each
import pyarrow.compute  # noqa: E402
import pyarrow.parquet  # noqa: E402
import transformers  # noqa: E402

import tests.verl.conftest  # noqa: E402, F401 # offline, one thread, VeRL's platform is a CPU
from errata_ablation.project_lessons import conversations, tokenizer_of  # noqa: E402
from errata_ablation.projects import Habits, Project, Split  # noqa: E402
from errata_ablation.serving import terminal_of  # noqa: E402
from errata_ablation.warmup import taught  # noqa: E402
from errata_trainer.recipes.verl import write_dataset  # noqa: E402
from tests.verl.cpu_run import Cluster, trained  # noqa: E402
from tests.verl.sampling_plugin import BATCHES  # noqa: E402

PROJECT = 1
GROUP = 8
WARM_UP, WARM_UP_BATCH = 260, 16
REWARD = "critic/score/mean"
HELD_OUT = "val-core/terminal/reward/mean@1"
TOLD = {"reward": REWARD, "held-out reward": HELD_OUT, "seconds": "timing_s/step"}
PARTS = ("gen", "old_log_prob", "adv", "update_actor", "update_weights")


def prepared(directory: Path, project: Project, say: Callable[[str], None]) -> None:
    """Teach the policy, and write it with its tokenizer.

    Args:
        directory: Directory for the policy, in ``model``.
        project: The tasks.
        say: Called with each line of progress.
    """
    tokenizer = tokenizer_of()
    lessons = lambda: conversations(project, Habits(), project.seed)  # noqa: E731
    policy = taught(lessons, tokenizer, directory, steps=WARM_UP, seed=project.seed, batch=WARM_UP_BATCH, say=say)
    shutil.copytree(policy, directory / "model", dirs_exist_ok=True)
    tokenizer.save_pretrained(directory / "model")
    (directory / "model" / BATCHES).unlink(missing_ok=True)


def write_splits(directory: Path, project: Project, url: str) -> None:
    """Write the tasks for training and those that are held out as VeRL's files."""
    everything = directory / "all.parquet"
    write_dataset(everything, url, "terminal", split="local", prompt="")
    table = pyarrow.parquet.read_table(everything)
    splits: tuple[Split, ...] = ("train", "held_out")
    for split in splits:
        tasks = pyarrow.array([json.dumps({"task_id": task.task_id}) for task in project.tasks[split]])
        chosen = table.filter(pyarrow.compute.is_in(table["task"], tasks))
        assert len(chosen) == len(tasks)
        pyarrow.parquet.write_table(chosen, directory / f"{split}.parquet")


def settings(directory: Path, steps: int, rollouts: int, seed: int) -> list[str]:
    """Return the arguments of VeRL's command that differ from those of the tests.

    Args:
        directory: Directory of the data.
        steps: Training steps.
        rollouts: Rollouts of a step.
        seed: Seed of the order of the tasks, of sampling and of the teachers' knowledge.
    """
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    teachers = (
        "{_target_:errata_ablation.teachers.StepTeachers,"
        f"project:{{_target_:errata_ablation.projects.Project,seed:{PROJECT}}},seed:{seed}}}"
    )
    return [
        "errata.tools=[run]",
        "errata.turns=2",
        "errata.turn_tokens=32",
        f"errata.channels.pairs={teachers}",
        "algorithm.alpha_sdpo=0.1",
        "algorithm.beta_replay=0.05",
        f"data.val_files={directory}/held_out.parquet",
        f"data.train_batch_size={rollouts // GROUP}",
        "data.shuffle=true",
        f"data.seed={seed}",
        "data.max_prompt_length=128",
        "data.max_response_length=160",
        f"{actor}.optim.lr=7e-4",
        f"{actor}.optim.weight_decay=0.0",
        f"{actor}.ppo_mini_batch_size={rollouts // GROUP}",
        f"{actor}.ppo_micro_batch_size_per_gpu={rollouts}",
        f"{rollout}.name=sampling",
        f"{rollout}.n={GROUP}",
        f"{rollout}.seed={seed}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={rollouts}",
        f"{rollout}.val_kwargs.temperature=1.0",
        f"{rollout}.val_kwargs.do_sample=true",
        "trainer.val_before_train=true",
        f"trainer.test_freq={steps}",
        f"trainer.total_training_steps={steps}",
        f"trainer.total_epochs={steps}",
    ]


@contextmanager
def followed(log: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say what VeRL logs, while it runs.

    Args:
        log: File of VeRL's log, which need not be there yet.
        say: Called with each line of progress.
    """
    ended = threading.Event()

    def follow() -> None:
        seen = 0
        while not ended.wait(1.0):
            lines = log.read_text().splitlines(keepends=True) if log.exists() else []
            for line in lines[seen:]:
                if line.endswith("\n"):
                    seen += 1
                    say(line_of(json.loads(line)))

    thread = threading.Thread(target=follow, name="log")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def line_of(logged: dict[str, Any]) -> str:
    """Return a line about a step of VeRL's log."""
    data = logged["data"]
    parts = [f"{name} {data[key]:.2f}" for name, key in TOLD.items() if key in data]
    return f"step {logged['step']}: {', '.join(parts)}"


def measured(directory: Path, logged: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return what a run shows.

    Args:
        directory: Directory of the run.
        logged: VeRL's log, by step; the first entry is the validation before training.
    """
    steps = [data for data in logged if REWARD in data]
    rewards = [data[REWARD] for data in steps]
    held_out = [data[HELD_OUT] for data in logged if HELD_OUT in data]
    batches = [json.loads(line) for line in (directory / "model" / BATCHES).read_text().splitlines()]
    tokens, seconds = sum(one["tokens"] for one in batches), sum(one["s"] for one in batches)
    return {
        "reward": rewards,
        "first_three": statistics.mean(rewards[:3]),
        "last_three": statistics.mean(rewards[-3:]),
        "held_out": {"before": held_out[0], "after": held_out[-1]},
        "lost": sum(data.get("episodes/lost", 0.0) for data in steps),
        "sites": sum(data.get("sdpo/kept", 0.0) for data in steps),
        "pairs": sum(data.get("dpo/pairs", 0.0) for data in steps),
        "step_s": {
            part: statistics.median(data[f"timing_s/{part}"] for data in steps if f"timing_s/{part}" in data)
            for part in ("step", *PARTS)
            if any(f"timing_s/{part}" in data for data in steps)
        },
        "generator": {"tokens": tokens, "s": seconds, "tokens_per_s": tokens / seconds, "batches": len(batches)},
    }


def main() -> None:
    """Train once, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="training steps")
    parser.add_argument("--rollouts", type=int, default=64, help="rollouts of a step, in groups of 8")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling, of the tasks' order and of the teachers")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    parser.add_argument(
        "--directory", type=Path, help="directory to keep the run in, with the policy and VeRL's output and log"
    )
    options = parser.parse_args()
    if options.rollouts < GROUP or options.rollouts % GROUP:
        parser.error(f"--rollouts is a multiple of {GROUP}")
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:6.1f} s] {line}", flush=True)

    transformers.utils.logging.disable_progress_bar()
    project = Project(PROJECT)
    with tempfile.TemporaryDirectory(prefix="verl-learning-") as temporary:
        directory = (options.directory or Path(temporary)).resolve()
        directory.mkdir(parents=True, exist_ok=True)
        prepared(directory, project, say)
        warm_s = time.monotonic() - began
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "bench"), os.environ.get("PYTHONPATH", "")])
        with terminal_of(project, directory / "terminal") as url, Cluster() as cluster:
            write_splits(directory, project, url)
            say("VeRL begins")
            with followed(directory / "log.jsonl", say):
                logged = trained(
                    directory,
                    url,
                    cluster,
                    *settings(directory, options.steps, options.rollouts, options.seed),
                    env="terminal",
                    plugin="tests.verl.sampling_plugin",
                )
        found = measured(directory, logged)
    found = {
        "steps": options.steps,
        "rollouts": options.rollouts,
        "seed": options.seed,
        "machine": {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        "versions": {name: version(name) for name in ("verl", "torch", "transformers", "ray")},
        **found,
        "warm_up_s": warm_s,
        "total_s": time.monotonic() - began,
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
