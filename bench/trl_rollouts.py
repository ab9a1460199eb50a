"""What a team waits for: a TRL training step with 64 rollouts on terminal tasks, stock OpenEnv against Errata.

    python bench/trl_rollouts.py            # prints JSON; needs root (sandboxes) and make trainer
    python bench/trl_rollouts.py --smoke    # once, 4 rollouts

Both arms play the same tasks in the same sandboxes with the same scripted student, so that generation costs both
alike and next to nothing: four commands and `submit`, graded by the task's verifier. With `compute` each command keeps
a core busy or is done at once; with `wait` the first waits 0.5 s, as what downloads or talks to a service does.
`stock` is OpenEnv's own server with the terminal environment's class, a socket and blocking client for each rollout,
and TRL's tool loop. `errata` is our server (durable journal, fsync), `environment_factory` and
`ThreeChannelGRPOTrainer` with channel 2 on. Wall time of `trainer.train()` for one step; medians of 5 alternating
rounds. The model is tiny: with a real one, generation and the backward pass come on top of both.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

if importlib.util.find_spec("trl") is None:
    print("left out: torch and TRL are missing (make trainer)")
    sys.exit(0)
if os.geteuid() != 0:
    print("left out: sandboxes of both servers need root")
    sys.exit(0)

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "trainer")]
import conftest  # noqa: E402, F401 # offline, one thread
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from openenv.core.generic_client import GenericEnvClient  # noqa: E402
from scripted import Scripted, call, config  # noqa: E402

from errata_server.process import ServerProcess  # noqa: E402
from errata_trainer.recipes.trl import ThreeChannelGRPOTrainer, environment_factory  # noqa: E402
from errata_trainer.tiny import tiny_model, tiny_tokenizer  # noqa: E402
from terminal_env import SPEC  # noqa: E402

SMOKE = "--smoke" in sys.argv[1:]
ROUNDS = 1 if SMOKE else 5
ROLLOUTS, GENERATIONS = (4, 2) if SMOKE else (64, 8)
TASKS = ("orders-summary", "log-redaction", "shift-hours", "python-intervals", "file-permissions", "release-links")
COMMANDS = ("ls -la", "cat README.md missing.txt", "python3 -c 'print(sum(range(1000)))'", "grep -rn total . | head -5")
WORKLOADS = {"compute": COMMANDS, "wait": ("sleep 0.5", *COMMANDS[1:])}

STOCK = """
import sys, uvicorn
from openenv.core.env_server.http_server import create_app
from terminal_env import TerminalAction, TerminalObservation
from terminal_env.server.environment import TerminalEnvironment
app = create_app(TerminalEnvironment, TerminalAction, TerminalObservation, max_concurrent_envs=256)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="error", access_log=False)
"""


class StockEnvironment:
    """What a TRL user writes for a stock OpenEnv server today."""

    url = ""

    def __init__(self) -> None:
        self._client = GenericEnvClient(self.url).sync()
        self._client.connect()
        self._reward = 0.0

    def reset(self, task_id: str, **_: Any) -> str:
        self._reward = 0.0
        return SPEC.agent_text(self._client.reset(task_id=task_id).observation)

    def run(self, command: str) -> str:
        """Run a bash command.

        Args:
            command: Bash text.
        """
        return SPEC.agent_text(self._client.step({"tool": "run", "command": command}).observation)

    def submit(self) -> str:
        """Say that the task is finished."""
        result = self._client.step({"tool": "submit"})
        self._reward = float(result.reward or 0.0)
        return SPEC.agent_text(result.observation)

    def get_reward(self) -> float:
        return self._reward

    def _close(self) -> None:  # a public method would be a tool
        self._client.close()


class StockTrainer(Scripted, trl.GRPOTrainer):  # type: ignore[misc]
    pass


class ErrataTrainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    pass


def student(row: int, turn: int, commands: tuple[str, ...] = COMMANDS) -> str:
    """Four commands, one of them a mistake, then the end."""
    if turn < len(commands):
        return call("run", command=commands[turn])
    return call("submit") if turn == len(commands) else "done"


def step(cls: Any, factory: Any, path: Path, commands: tuple[str, ...], **given: Any) -> float:
    """Return the wall time of one training step."""
    rows = [
        {"prompt": [{"role": "user", "content": "Do it. "}], "task_id": TASKS[n % len(TASKS)]}
        for n in range(ROLLOUTS // GENERATIONS)
    ]
    tokenizer = tiny_tokenizer([call("run", command=command) for command in commands])
    trainer = cls(
        model=tiny_model(tokenizer, hidden=32, layers=1, positions=16384),
        processing_class=tokenizer,
        args=config(
            path,
            per_device_train_batch_size=ROLLOUTS,
            num_generations=GENERATIONS,
            max_completion_length=12000,
        ),
        train_dataset=Dataset.from_list(rows),
        environment_factory=factory,
        **given,
    )
    trainer.script = functools.partial(student, commands=commands)
    began = time.monotonic()
    trainer.train()
    took = time.monotonic() - began
    if cls is StockTrainer:
        for environment in trainer.environments:
            environment._close()  # the server holds so many sessions and no more
    played = trainer.state.log_history[0]["tools/call_frequency"]
    if played != len(commands) + 1:
        raise RuntimeError(f"{played} calls a rollout instead of {len(commands) + 1}: the arms do not play the same")
    return took


def compared(
    arms: Mapping[str, Callable[[tuple[str, ...]], float]], commands: tuple[str, ...]
) -> dict[str, dict[str, float]]:
    """Return the seconds of a step in each arm and the ratio of them, measured in turns."""
    seconds: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(ROUNDS):
        for arm, measure in arms.items():
            seconds[arm].append(measure(commands))
    ratios = [a / b for a, b in zip(seconds["stock"], seconds["errata"], strict=True)]
    return {
        "seconds": {arm: statistics.median(values) for arm, values in seconds.items()},
        "times_faster": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name)
        port = "8397"
        stock = subprocess.Popen(
            [sys.executable, "-c", STOCK, port], env={**os.environ, "ERRATA_DATA_DIR": str(path / "s")}
        )
        try:
            with ServerProcess("terminal", path / "data") as server:
                StockEnvironment.url = f"http://127.0.0.1:{port}"
                factory = environment_factory(server.url, tools=["run", "submit"], task_columns=["task_id"])
                arms: dict[str, Callable[[tuple[str, ...]], float]] = {
                    "stock": lambda commands: step(StockTrainer, StockEnvironment, path, commands),
                    "errata": lambda commands: step(ErrataTrainer, factory, path, commands, beta_replay=0.0),
                }
                for arm in arms.values():
                    arm(COMMANDS)  # tasks are unpacked and code is imported once
                figures = {name: compared(arms, commands) for name, commands in WORKLOADS.items()}
        finally:
            stock.terminate()
            stock.wait()
    found = {
        "rounds": ROUNDS,
        "rollouts": ROLLOUTS,
        "calls_a_rollout": len(COMMANDS) + 1,
        "machine": {"cpus": len(os.sched_getaffinity(0)), "python": platform.python_version()},
        **figures,
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
