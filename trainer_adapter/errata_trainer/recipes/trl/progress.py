"""The progress line in place of the dictionary that transformers prints."""

from __future__ import annotations

from typing import Any

from transformers import PrinterCallback, ProgressCallback

from ...progress import progress_line


class LinePrinter(PrinterCallback):  # type: ignore[misc]
    """Prints a line for each logged step, where there is no progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the step's line; of what is no step, what transformers prints."""
        if logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_local_process_zero:
            print(progress_line(state.global_step, logs, state.max_steps), flush=True)


class LineProgress(ProgressCallback):  # type: ignore[misc]
    """Writes a line for each logged step above the progress bar."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the step's line; of what is no step, what transformers writes."""
        if logs is None or "loss" not in logs:
            super().on_log(args, state, control, logs=logs, **kwargs)
        elif state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(progress_line(state.global_step, logs, state.max_steps))


def show_lines(trainer: Any) -> None:
    """Put the line in place of transformers' own printing; a callback of somebody else's is left alone."""
    own = [
        callback
        for callback in trainer.callback_handler.callbacks
        if type(callback) in (PrinterCallback, ProgressCallback)
    ]
    for callback in own:
        trainer.remove_callback(callback)
        trainer.add_callback(LinePrinter if type(callback) is PrinterCallback else LineProgress)
