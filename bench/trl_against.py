"""What a step of the channels costs against another commit's, in paired alternating rounds on one thread.

    git worktree add ../older a977b2d
    python bench/trl_against.py ../older            # prints JSON; ten minutes
    python bench/trl_against.py ../older --rounds 7
    python bench/trl_against.py --smoke             # once, this tree against itself

Each commit runs in a process of its own with its own packages, test helpers and server; both are asked in turn for one
optimizer step's losses and backward pass, on the same recorded rollouts: four rows with two error sites each and, where
an arm has channel 3, a pair for each row whose rejected action is the row's own. The fixed teacher is the model below a
LoRA adapter; a batch that is used twice (``num_iterations`` 2) is two steps. CPU seconds; generation is scripted and
not timed. A ratio below 1 says that this commit is faster; intervals are 95 % t intervals of the log ratios.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if importlib.util.find_spec("trl") is None:
    print("left out: torch and TRL are missing (make trainer)")
    sys.exit(0)

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("protocol", "client", "server", "envs", "trainer_adapter", "bench")
ARMS: dict[str, dict[str, Any]] = {
    "sdpo": {"teacher": "live", "beta_replay": 0.0},
    "sdpo + dpo": {"teacher": "live", "beta_replay": 0.05},
    "sdpo, ema": {"teacher": "ema", "beta_replay": 0.0},
    "sdpo, fixed teacher": {"teacher": "base", "beta_replay": 0.0},
    "sdpo, fixed teacher, batch used twice": {"teacher": "base", "beta_replay": 0.0, "uses": 2},
}
T95 = {4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 14: 2.145, 19: 2.093}


def worker(source: Path) -> None:
    """Answer each line with an arm's name by its CPU seconds, with the packages of a source tree."""
    sys.path[:0] = [str(source), str(source / "tests" / "trainer")]
    import conftest  # noqa: F401 # offline, one thread
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from scripted import Scripted, call, config

    import errata_trainer
    from errata_server.process import ServerProcess
    from errata_trainer import DpoPair
    from errata_trainer.episodes.tools import of_spec
    from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer, environment_factory
    from errata_trainer.tiny import tiny_model, tiny_tokenizer
    from tests.environments.shelf import SPEC

    if not Path(errata_trainer.__file__).is_relative_to(source):
        sys.exit(f"{errata_trainer.__file__} is not of {source}")

    class Pairs:  # older trees have no base for it
        nll, margins, waits, needs_logprobs = 0.0, None, False, False

        def use(self, tokenizer: Any, end_ids: Any, reference: str, **template: Any) -> None:
            self.chosen = tuple(tokenizer.encode(call("read", path="red") + "<|im_end|>", add_special_tokens=False))

        def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
            self.pairs = [
                DpoPair(r.prompt_ids + r.completion_ids[: t.start], self.chosen, r.completion_ids[t.start : t.stop])
                for r in rollouts
                for t in r.turns[1:2]
            ]

        def sample(self, count: int, referred: Callable[[Any], list[Any]]) -> list[Any]:
            return referred(self.pairs[:count])

        def metrics(self) -> dict[str, float]:
            return {}

    class Ours(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
        pass

    def failing(row: int, turn: int) -> str:
        words = f"{row} " + "word " * (250 + 10 * row)
        return [call("read", path="red") + words, call("read", path="green"), call("read", path="blue"), words][turn]

    def made(url: str, path: Path, teacher: Any, beta_replay: float, uses: int = 1) -> Any:
        tokenizer = tiny_tokenizer([call("read", path="green"), "the word is owl no file", "word " * 4])
        rows = [{"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}] * 4
        peft = {"peft_config": LoraConfig(r=8, target_modules=["q_proj", "v_proj"])} if teacher == "base" else {}
        trainer = Ours(
            model=tiny_model(tokenizer, hidden=256, layers=4),
            processing_class=tokenizer,
            args=config(
                path, per_device_train_batch_size=4, num_generations=4, max_completion_length=3000, num_iterations=uses
            ),
            train_dataset=Dataset.from_list(rows),
            environment_factory=environment_factory(url, of_spec(SPEC)),
            settings=ChannelSettings(teacher=teacher),
            alpha_sdpo=0.1,
            beta_replay=beta_replay,
            pairs=Pairs() if beta_replay else None,
            **peft,
        )
        trainer.script = failing
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        return trainer, trainer._generate_and_score_completions([dict(row) for row in rows])

    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess("tests.environments.shelf:SPEC", Path(folder) / "data") as server,
    ):
        prepared = {arm: made(server.url, Path(folder), **given) for arm, given in ARMS.items()}
        sites = {arm: sum(map(len, batch["sdpo_items"])) for arm, (_, batch) in prepared.items()}
        print(json.dumps({"sites": sites, "torch": torch.__version__}), flush=True)
        for line in sys.stdin:
            trainer, batch = prepared[line.strip()]
            for name in ("clear_kept", "forget"):  # what a new generation batch does; older trees have the second name
                if hasattr(trainer._distillation, name):
                    getattr(trainer._distillation, name)()
            began = time.process_time()
            for _ in range(trainer.num_iterations):
                trainer.compute_loss(trainer.model, batch).backward()
            took = time.process_time() - began
            trainer.model.zero_grad()
            print(took, flush=True)


class Commit:
    """A process with the packages of a source tree."""

    def __init__(self, source: Path) -> None:
        paths = [str(source / package) for package in PACKAGES] + [str(source)]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", str(source)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=source,
        )
        self.about = json.loads(self._line())

    def _line(self) -> str:
        assert self.process.stdout is not None
        while True:
            line = self.process.stdout.readline()
            if not line:
                sys.exit(f"the worker ended with {self.process.wait()}")
            if line[0] in "{0123456789":
                return line

    def seconds(self, arm: str) -> float:
        """Return what one step costs."""
        assert self.process.stdin is not None
        self.process.stdin.write(arm + "\n")
        self.process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("older", type=Path, nargs="?", help="a worktree of the other commit")
    parser.add_argument("--smoke", action="store_true", help="once, this tree against itself: measures nothing")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.older.resolve())
        return
    if options.smoke:
        options.older, options.rounds = ROOT, 2
    elif options.older is None:
        parser.error("name a worktree of the other commit")
    ours, older = Commit(ROOT), Commit(options.older.resolve())
    ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for arm in ARMS:  # what is made once is made now
        ours.seconds(arm), older.seconds(arm)
    for number in range(options.rounds):
        for arm in ARMS:
            pair = [ours, older] if number % 2 else [older, ours]
            took = {commit: commit.seconds(arm) for commit in pair}
            ratios[arm].append(took[ours] / took[older])
            seconds[arm].append(took[older])
    found = {}
    for arm, values in ratios.items():
        logs = [math.log(value) for value in values]
        half = T95.get(len(logs) - 1, 2.0) * statistics.stdev(logs) / math.sqrt(len(logs))
        middle = statistics.mean(logs)
        found[arm] = {
            "ratio": round(math.exp(middle), 3),
            "interval": [round(math.exp(middle - half), 3), round(math.exp(middle + half), 3)],
            "older_s": round(statistics.median(seconds[arm]), 3),
        }
    print(json.dumps({"rounds": options.rounds, "ours": ours.about, "older": older.about, "arms": found}, indent=1))
    ours.close()
    older.close()


if __name__ == "__main__":
    main()
