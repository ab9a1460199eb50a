"""The example trains with all three channels, its parts as actors."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

from errata_server.process import ServerProcess

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
import monarch_grpo

def look(path):
    return "step", {"tool": "read", "path": path}

last = "step", {"tool": "submit", "word": "owl"}
script = monarch_grpo.Script("shelf", {"place": "red"}, look("blue"), look("red"), last)
made, counts = asyncio.run(monarch_grpo.train(sys.argv[1], script, steps=2))
print("made", made)
print("counts", counts)
"""


def test_the_example_trains_with_three_channels(server: ServerProcess) -> None:
    paths = os.pathsep.join([str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.url],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(("made", "counts")))
    made, counts = (ast.literal_eval(printed[name]) for name in ("made", "counts"))
    for step in made:
        assert 0 < step["rollouts"] == step["late scores"] <= 6, "those that were not lost"
    channels = {name for step in made for name in step if name.startswith("loss/")}
    assert channels == {"loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo"}, "all three in two steps"
    assert sum(step["sites"] for step in made) > 0 and sum(step["pairs"] for step in made) > 0
    assert counts["rewards/posted"] == sum(step["late scores"] for step in made) and counts["teachers/posted"] > 0
    assert not any(value for name, value in counts.items() if "failed" in name or "not_scored" in name), counts
