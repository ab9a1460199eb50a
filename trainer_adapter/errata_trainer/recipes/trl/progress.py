"""Prints the progress line instead of the metrics dictionary that transformers prints."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback

from ...progress import progress_line


class LinePrinter(PrinterCallback):  # type: ignore[misc]
    """Prints a line for each logged step, where there is no progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line of a step; other logs are printed as transformers does."""
        if logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_local_process_zero:
            print(progress_line(state.global_step, logs, state.max_steps), flush=True)


class LineProgress(ProgressCallback):  # type: ignore[misc]
    """Writes a line for each logged step above the progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the line of a step; other logs are written as transformers does."""
        if logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(progress_line(state.global_step, logs, state.max_steps))


def show_lines(trainer: Any) -> None:
    """Replace transformers' own printing callbacks; other callbacks are not changed."""
    own = [
        callback
        for callback in trainer.callback_handler.callbacks
        if type(callback) in (PrinterCallback, ProgressCallback)
    ]
    for callback in own:
        trainer.remove_callback(callback)
        trainer.add_callback(LinePrinter if type(callback) is PrinterCallback else LineProgress)
