"""The line that a person reads at each step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback

from errata_trainer.monitoring.progress import progress_line
from errata_trainer.recipes.trl.progress import LinePrinter, LineProgress, show_lines

LOGS = {
    "loss": 0.5,
    "reward": 0.4375,
    "rollouts/errors": 0.625,
    "rollouts/calls": 3.1,
    "frac_reward_zero_std": 0.25,
    "episodes/lost": 0.0,
    "loss/grpo": -0.0125,
    "loss/sdpo_kl": 0.03125,
    "sdpo/kept": 9.0,
    "sdpo/no_hint": 2.0,
    "sdpo/not_better": 3.0,
    "loss/trace_replay_dpo": 0.69,
    "dpo/pairs": 4.0,
    "counterfactual/accepted": 0.75,
    "dpo/pool/teachers/usd": 1.5,
    "step_time": 12.34,
}


def test_a_line_has_what_one_looks_at_first() -> None:
    assert progress_line(12, LOGS, 200) == (
        "step 12/200, reward 0.438, errors 0.62 a rollout, same reward in 25% of groups, calls 3.10 a rollout, "
        "9 of 14 failing turns distilled, grpo -0.0125, sdpo 0.0312, dpo 0.6900 (4 pairs), hints helped 75%, "
        "teachers 1.50 USD, 12.3 s"
    )
    assert progress_line(1, {"sdpo/kept": 0.0, "sdpo/no_hint": 3.0}, eid="abc") == (
        "step 1, 0 of 3 failing turns distilled, errata replay abc"
    ), "a number that is to be above 0 is shown where it is 0"
    assert progress_line(1, {"loss": 1.0, "reward": None, "loss/grpo": 1.0}) == "step 1, grpo 1.0000"
    lost = {"episodes/lost": 0.25, "dpo/pool/teachers/usd": 0.0, "dpo/pool/teachers/tokens": 12345.0}
    assert progress_line(1, lost) == "step 1, 25% of the episodes lost, teachers 12,345 tokens"


class Trainer:
    def __init__(self, *callbacks: Any) -> None:
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.remove(callback)

    def add_callback(self, callback: Any) -> None:
        self.callback_handler.callbacks.append(callback)


def test_it_stands_in_place_of_transformers_own_printing_and_nobody_elses() -> None:
    class Own(PrinterCallback):  # type: ignore[misc]
        pass

    trainer = Trainer(PrinterCallback(), own := Own(), ProgressCallback())
    show_lines(trainer, lambda: "abc")
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds == [Own, LinePrinter, LineProgress] and trainer.callback_handler.callbacks[0] is own
    assert [callback.eid() for callback in trainer.callback_handler.callbacks[1:]] == ["abc", "abc"]


def test_what_is_no_step_is_printed_as_before(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    state = SimpleNamespace(
        global_step=3, max_steps=9, is_local_process_zero=True, is_world_process_zero=True, log_history=[]
    )
    printer = LinePrinter()
    printer.eid = lambda: "abc"
    printer.on_log(None, state, None, logs=dict(LOGS))
    printer.on_log(None, state, None, logs={"train_runtime": 2.0})
    first, second = capsys.readouterr().out.splitlines()
    assert (
        first.startswith("step 3/9, reward 0.438")
        and first.endswith(", errata replay abc")
        and "train_runtime" in second
    )
    state.is_local_process_zero = False
    printer.on_log(None, state, None, logs=dict(LOGS))
    assert capsys.readouterr().out == "", "one line, not one for each process"
