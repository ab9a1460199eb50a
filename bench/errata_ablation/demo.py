"""``errata demo learning``: a tiny policy, taught on the spot, learns in tasks that carry over to others."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from errata_protocol.errors import ErrataError

from .installation import install_command

if TYPE_CHECKING:
    from .learning import Learned
    from .records import Evaluation

WIDTH = 40


def main(arguments: Sequence[str] = ()) -> int:
    """Run the demo; return 0 when the reward on held-out tasks rose and none of them was trained on."""
    parser = argparse.ArgumentParser(
        prog="errata demo learning",
        description="A tiny policy trains on 104 generated terminal tasks and is evaluated on 104 others; no download.",
    )
    parser.add_argument("--plot", type=Path, help="write the curve as an image, too (PNG or SVG, by its name)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(list(arguments))
    needed = ["torch", "trl"] + ["matplotlib"] * (options.plot is not None)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        print(f"errata demo learning: {' and '.join(missing)} missing: {install_command()}", file=sys.stderr)
        return 1
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - started:5.1f} s] {line}", file=sys.stderr if options.json else None, flush=True)

    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TRL_EXPERIMENTAL_SILENCE", "1"),
    ):
        os.environ.setdefault(name, value)
    say("loading torch and TRL")
    import torch
    import transformers

    from .learning import learn

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # a policy this small is no faster with more
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory(prefix="errata-learning-") as directory:
            warnings.simplefilter("ignore", FutureWarning)  # transformers renames its options
            found = learn(Path(directory), say=say)
    except ErrataError as error:
        print(f"errata demo learning: {error.message}", file=sys.stderr)
        return 1
    if options.plot:
        _draw(found.curve, options.plot)
    print(json.dumps(found.data()) if options.json else _text(found, time.monotonic() - started))
    for failure in found.failures:
        print(f"errata demo learning: {failure}", file=sys.stderr)
    return 1 if found.failures else 0


def _text(found: Learned, took_s: float) -> str:
    first, last = found.known[0], found.known[-1]
    lines = ["", "rollouts  reward on held-out tasks, each played once"]
    for one in found.curve:
        filled = round(one.reward * WIDTH)
        lines.append(f"{one.rollouts:8d}  {one.reward:.2f}  {'█' * filled}{'·' * (WIDTH - filled)}")
    overlap = len(found.trained_on & found.held_out)
    lines += [
        "",
        f"trained on {len(found.trained_on)} tasks, evaluated on {len(found.held_out)} others; in both: {overlap}",
        f"tasks in which nothing had to be learnt: {first.reward:.2f} before, {last.reward:.2f} after",
        f"{found.asked} resets, forks and steps asked for; the terminal made {found.played}, a memory had the other "
        "answers",
        f"all of it in {took_s:.0f} s: one policy and one seed; docs/experiments/projects.md compares the channels",
    ]
    return "\n".join(lines)


def _draw(curve: Sequence[Evaluation], path: Path) -> None:
    """Write the curve as an image."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "errata"  # the same curve is the same file
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.4, 3.4))
    axis.plot([one.rollouts for one in curve], [one.reward for one in curve], "o-")
    axis.set_xlabel("rollouts trained on")
    axis.set_ylabel("reward on held-out tasks")
    axis.set_ylim(0, 1)
    axis.set_title("errata demo learning: one policy, one seed", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
