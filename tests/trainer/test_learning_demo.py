"""``errata demo learning``: a policy learns in the real terminal what serves tasks that it never trained on."""

from __future__ import annotations

import json

import pytest

from errata_ablation import demo
from errata_ablation.learning import PROJECT
from errata_ablation.projects import Project

RISE = 0.15
"""Less than half of the rise that was measured, 0.376.

The same machine and versions give the same curve: the seeds of weights, lessons, sampling and tasks are fixed, torch
computes on one thread, and the terminal's answers do not depend on when or in which order it is asked. Another
processor or torch rounds otherwise, and so has another curve.
"""


@pytest.mark.sandbox
@pytest.mark.learning
@pytest.mark.timeout(900)  # 7 minutes beside a load of 13
def test_the_reward_on_tasks_that_were_never_trained_on_rises(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    curve = [one["reward"] for one in told["curve"]]
    assert told["curve"][0]["rollouts"] == 0 and len(curve) == 5
    assert all(one["tasks"] == 104 for one in told["curve"])
    assert curve[-1] - curve[0] >= RISE, curve
    assert 0 < told["played"] < told["asked"]
    # Which tasks were played in training is noted at each reset, and is not read off the project's division.
    project = Project(PROJECT)
    trained_on, held_out = set(told["trained_on"]), set(told["held_out"])
    assert held_out == {task.task_id for task in project.tasks["held_out"]}
    assert trained_on and trained_on <= {task.task_id for task in project.tasks["train"]}
    assert not trained_on & held_out
    instructions = {project.task(task_id).instruction for task_id in trained_on}
    assert not instructions & {project.task(task_id).instruction for task_id in held_out}


def test_without_what_trains_the_demo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    assert demo.main([]) == 1
    told = capsys.readouterr().err
    assert "pip install" in told and "[ablation]" in told
