"""Prints the progress line instead of the metrics dictionary that transformers prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, ProgressCallback

from ...monitoring.progress import progress_line


def _no_episode() -> str | None:
    return None


class LinePrinter(PrinterCallback):  # type: ignore[misc]
    """Prints a line for each logged step, where there is no progress bar.

    Attributes:
        eid: Function that returns the key of an episode to look at.
    """

    eid: Callable[[], str | None] = staticmethod(_no_episode)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line of a step; other logs are printed as transformers does."""
        if logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_local_process_zero:
            print(progress_line(state.global_step, logs, state.max_steps, self.eid()), flush=True)


class LineProgress(ProgressCallback):  # type: ignore[misc]
    """Writes a line for each logged step above the progress bar.

    Attributes:
        eid: Function that returns the key of an episode to look at.
    """

    eid: Callable[[], str | None] = staticmethod(_no_episode)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line of a step; other logs are written as transformers does."""
        if logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(progress_line(state.global_step, logs, state.max_steps, self.eid()))


def show_lines(trainer: Any, eid: Callable[[], str | None] = _no_episode) -> None:
    """Replace transformers' own printing callbacks; other callbacks are not changed.

    Args:
        trainer: The trainer.
        eid: Function that returns the key of an episode of the last batch to look at; None for none.
    """
    own = [
        callback
        for callback in trainer.callback_handler.callbacks
        if type(callback) in (PrinterCallback, ProgressCallback)
    ]
    for callback in own:
        trainer.remove_callback(callback)
        line = LinePrinter() if type(callback) is PrinterCallback else LineProgress()
        line.eid = eid
        trainer.add_callback(line)
