"""What Errata's recipe costs and saves in TRL's trainer, on one thread; ratios, medians of 5 alternating rounds.

    python bench/trl_step.py            # prints JSON; a quarter of an hour
    python bench/trl_step.py --smoke    # once, small

`channels`: one optimizer step's losses and backward pass on the same batch of recorded rollouts (two error sites in
each row, one pair for each row whose rejected action is the row's own turn): GRPO alone, with channel 2, with
channel 3, with all. `zero` is our trainer with both weights 0 against `GRPOTrainer`. `tools`: 8 rollouts that call a
tool of 0.2 s once, TRL's tool loop against `ParallelTools`. Generation is scripted in all of them, so none of it is
timed.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if importlib.util.find_spec("trl") is None:
    print("left out: torch and TRL are missing (make trainer)")
    sys.exit(0)

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]
import conftest  # noqa: E402, F401 # offline, one thread
import torch  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from scripted import Scripted, call, config  # noqa: E402

from errata_server.process import ServerProcess  # noqa: E402
from errata_trainer import DpoPair  # noqa: E402
from errata_trainer.assembly.pair_source import PairSource  # noqa: E402
from errata_trainer.episodes.tools import of_spec  # noqa: E402
from errata_trainer.recipes.trl import ParallelTools, ThreeChannelGRPOTrainer, environment_factory  # noqa: E402
from errata_trainer.tiny import tiny_model, tiny_tokenizer  # noqa: E402
from tests.environments.shelf import SPEC  # noqa: E402

SMOKE = "--smoke" in sys.argv[1:]
ROUNDS = 1 if SMOKE else 5
ROWS = 2 if SMOKE else 4
LONG = 20 if SMOKE else 250
HIDDEN, LAYERS = (32, 1) if SMOKE else (256, 4)
SHELF = of_spec(SPEC)


class Pairs(PairSource):
    """One pair a row: the last turn of another row is chosen over the row's own first."""

    def use(self, tokenizer: Any, end_ids: Any, reference: str, **template: Any) -> None:
        self.chosen = tuple(tokenizer.encode(call("read", path="red") + "<|im_end|>", add_special_tokens=False))

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        self.pairs = [
            DpoPair(r.prompt_ids + r.completion_ids[: t.start], self.chosen, r.completion_ids[t.start : t.stop])
            for r in rollouts
            for t in r.turns[1:2]
        ]

    def sample(self, count: int, referred: Callable[[Any], list[DpoPair]]) -> list[DpoPair]:
        return referred(self.pairs[:count])


class Ours(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    pass


class Plain(Scripted, trl.GRPOTrainer):  # type: ignore[misc]
    pass


class Tools(Scripted, ParallelTools, trl.GRPOTrainer):  # type: ignore[misc]
    pass


def made(cls: Any, url: str, path: Path, script: Any, rows: int, **given: Any) -> Any:
    """Return a trainer whose students say what a script says."""
    tokenizer = tiny_tokenizer([call("read", path="green"), "the word is owl no file", "word " * 4])
    rows_ = [{"prompt": [{"role": "user", "content": "Find it. "}], "place": "red", "word": "owl"}] * 4
    trainer = cls(
        model=tiny_model(tokenizer, hidden=HIDDEN, layers=LAYERS),
        processing_class=tokenizer,
        args=config(path, per_device_train_batch_size=rows, num_generations=rows, max_completion_length=3000),
        train_dataset=Dataset.from_list(rows_),
        environment_factory=environment_factory(url, SHELF),
        **given,
    )
    trainer.script = script
    return trainer


def failing(row: int, turn: int) -> str:
    """Two failing turns behind a long one, then a long last word."""
    words = f"{row} " + "word " * LONG
    return [call("read", path="red") + words, call("read", path="green"), call("read", path="blue"), words][turn]


def losses(trainer: Any) -> float:
    """Return CPU seconds of one step's losses and backward pass; the batch is made before, and not timed."""
    rows = [dict(row) for row in trainer.train_dataset][:1] * trainer.args.per_device_train_batch_size
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = trainer._generate_and_score_completions(rows)
    began = time.process_time()
    trainer.compute_loss(trainer.model, batch).backward()
    took = time.process_time() - began
    trainer.model.zero_grad()
    return took


def channels(url: str, path: Path) -> dict[str, Any]:
    """Time what each channel adds."""
    arms: dict[str, tuple[Any, dict[str, Any]]] = {
        "grpo": (Plain, {}),
        "zero": (Ours, {"alpha_sdpo": 0.0, "beta_replay": 0.0, "pairs": Pairs()}),
        "sdpo": (Ours, {"alpha_sdpo": 0.1, "beta_replay": 0.0}),
        "dpo": (Ours, {"alpha_sdpo": 0.0, "beta_replay": 0.05, "pairs": Pairs()}),
        "all": (Ours, {"alpha_sdpo": 0.1, "beta_replay": 0.05, "pairs": Pairs()}),
    }
    trainers = {name: made(cls, url, path, failing, ROWS, **given) for name, (cls, given) in arms.items()}
    for trainer in trainers.values():
        losses(trainer)  # what is made once is made now
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(ROUNDS):
        for name, trainer in trainers.items():
            seconds[name].append(losses(trainer))
    ratios = {
        name: [a / b for a, b in zip(seconds[name], seconds["grpo"], strict=True)] for name in arms if name != "grpo"
    }
    return {
        "tokens_a_row": len(trainers["all"].transcripts.prompt_ids[0] + trainers["all"].transcripts.completion_ids[0]),
        "grpo_s": statistics.median(seconds["grpo"]),
        "ratio": {name: spread(values) for name, values in ratios.items()},
    }


def tools(url: str, path: Path) -> dict[str, Any]:
    """Time the tool loops: wall seconds, for waiting is what they do."""

    def slow(row: int, turn: int) -> str:
        return call("read", path="slow") if turn == 0 else "done"

    trainers = {cls: made(cls, url, path, slow, 8) for cls in (Plain, Tools)}
    seconds: dict[Any, list[float]] = {cls: [] for cls in trainers}
    for _ in range(ROUNDS + 1):
        for cls, trainer in trainers.items():
            rows = [dict(row) for row in trainer.train_dataset][:1] * 8
            loop = trainer._tool_call_loop
            took: list[float] = []

            def timed(*arguments: Any, loop: Any = loop, took: list[float] = took) -> Any:
                began = time.monotonic()
                try:
                    return loop(*arguments)
                finally:
                    took.append(time.monotonic() - began)

            trainer._tool_call_loop = timed
            trainer._generate_and_score_completions(rows)
            del trainer._tool_call_loop
            seconds[cls].append(took[0])
    ratios = [a / b for a, b in zip(seconds[Plain][1:], seconds[Tools][1:], strict=True)]
    return {"trl_s": statistics.median(seconds[Plain][1:]), "times_faster": spread(ratios)}


def spread(values: list[float]) -> dict[str, float]:
    """Return median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def main() -> None:
    """Measure and print."""
    with (
        tempfile.TemporaryDirectory() as name,
        ServerProcess("tests.environments.shelf:SPEC", Path(name) / "data") as server,
    ):
        found = {
            "rounds": ROUNDS,
            "machine": {"cpus": len(__import__("os").sched_getaffinity(0)), "python": platform.python_version()},
            "versions": {"torch": torch.__version__, "trl": trl.__version__},
            "channels": channels(server.url, Path(name)),
            "tools": tools(server.url, Path(name)),
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
