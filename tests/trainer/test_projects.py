"""The generated family with held-out tasks, the memory in front of its terminal, and the figures over policies."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from openenv.core.client_types import StepResult

from errata_ablation import Plan, Run, cli, read_plan
from errata_ablation.held_out import curve, summary, text
from errata_ablation.memo import Memo
from errata_ablation.plan import Arm
from errata_ablation.project_lessons import conversations, tokenizer_of
from errata_ablation.projects import (
    COMPLAINTS,
    KNOWN,
    OPERATIONS,
    VALUES,
    Habits,
    Project,
    Step,
    hint_of,
    lessons,
)
from errata_ablation.records import Evaluation
from errata_ablation.serving import terminal_of
from errata_ablation.statistics import censored_median, clustered, first_reached
from errata_ablation.training import _alpha
from errata_protocol.errors import InvalidRequest
from errata_trainer.hints import TemplateHinter
from errata_trainer.recipes.trl import environment_factory

pytestmark = pytest.mark.projects

ROOT = Path(__file__).parents[2]


# The family


@pytest.mark.parametrize("seed", [0, 7, 23])
def test_no_task_for_evaluation_is_one_for_training_and_both_need_the_same_knowledge(seed: int) -> None:
    project = Project(seed)
    train, held_out, known = (
        {task.task_id for task in project.tasks[split]} for split in ("train", "held_out", "known")
    )
    assert len(train) >= 100 and len(held_out) >= 100 and known
    assert not train & held_out and not train & known and not held_out & known
    instructions = {task.instruction for task in project.tasks["train"]}
    assert not instructions & {task.instruction for task in project.tasks["held_out"]}
    for split in ("train", "held_out"):
        met = {step.operation for task in project.tasks[split] for step in task.steps}
        assert met == set(project.operations)
        assert {OPERATIONS[operation] for operation in met} == set(COMPLAINTS), "every kind of error can be met"
    assert all(step.operation in KNOWN for task in project.tasks["known"] for step in task.steps)
    assert Project(seed).tasks == project.tasks, "a project is made of its seed"


def test_a_belief_is_wrong_where_something_has_to_be_learnt_and_right_where_nothing_has() -> None:
    for seed in range(20):
        project = Project(seed)
        assert all(project.beliefs[one] != project.conventions[one] for one in OPERATIONS)
        assert all(project.beliefs[one] == project.conventions[one] for one in KNOWN)


def test_projects_differ_in_their_conventions() -> None:
    assert len({tuple(Project(seed).conventions.values()) for seed in range(8)}) == 8


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_shipped_hint_of_each_kind_of_error_names_the_value(operation: str) -> None:
    hint = hint_of(Step(operation, "oak"), "red", "gold", TemplateHinter())
    assert "gold" in hint and hint.startswith("Hint for your next action: ")


def test_lessons_tell_no_convention_but_the_known_ones_and_hints_are_followed() -> None:
    project = Project(3)
    counts: dict[tuple[bool, bool], int] = {}
    for said, learnt in islice(lessons(project, Habits(), 0), 4000):
        calls = [(place, message) for place, (role, message) in enumerate(said) if role in ("call", "garbled")]
        for place, command in calls:
            operation, value = command.removeprefix("./").split()
            if operation in KNOWN:
                assert value == project.conventions[operation]
                continue
            hint = said[place - 1][1] if said[place - 1][0] == "user" and place > 1 else ""
            right = value == project.conventions[operation]
            key = (bool(hint), right)
            counts[key] = counts.get(key, 0) + 1
            if hint and place >= learnt:
                assert value in hint, "behind a hint the student uses the value that it names"
        assert not any("complete JSON object" in text for _, text in said), "the hint of tool.malformed is not taught"
    for hinted, expected in ((False, 0.5 / len(VALUES)), (True, 1 / len(VALUES))):
        share = counts[hinted, True] / (counts[hinted, True] + counts[hinted, False])
        assert abs(share - expected) < 0.03


def test_a_conversation_has_the_words_that_the_student_says_and_nothing_else_to_learn() -> None:
    learnt = [text for text, own in next(conversations(Project(0), Habits(garbled=0.0), 0)) if own]
    assert [text.startswith("<tool_call>") for text in learnt] == [True, True, False]
    assert len(tokenizer_of()) <= 640


def wrong(project: Project, operation: str) -> str:
    return next(value for value in VALUES if value != project.conventions[operation])


@pytest.mark.sandbox
def test_in_the_real_terminal_each_kind_is_marked_and_each_task_can_be_solved(tmp_path: Path) -> None:
    project = Project(0, train=12, held_out=0, known=1)
    with terminal_of(project, tmp_path) as url:
        runner = environment_factory(url, tools=["run"])()._runner
        marked = set()
        for task in project.tasks["train"]:
            for solved in (False, True):
                assert runner.reset({"task_id": task.task_id}) == task.instruction
                for step in task.steps:
                    value = project.conventions[step.operation] if solved else wrong(project, step.operation)
                    runner.call("run", {"command": step.command(value)})
                markers = [call.marker for call in runner.played]
                if solved:
                    assert markers == [None, None] and runner.finish() == 1.0
                else:
                    for step, marker in zip(task.steps, markers, strict=True):
                        assert marker is not None and marker.severity == "error"
                        assert marker.hint_template_key == OPERATIONS[step.operation]
                        marked.add(marker.hint_template_key)
                    assert runner.finish() == 0.0
        assert marked == set(COMPLAINTS)
        runner.close()


@pytest.mark.sandbox
def test_the_memory_answers_as_the_real_terminal_does(tmp_path: Path) -> None:
    project = Project(1, train=6, held_out=6, known=2)
    chance = random.Random(0)
    with terminal_of(project, tmp_path) as url:
        played = environment_factory(url, tools=["run"])
        memo = Memo(played._connect, lambda task: project.task(task["task_id"]).files)
        remembered = type("Remembered", (played,), {"_connect": staticmethod(memo.session)})
        mine, real = remembered()._runner, played()._runner
        tasks = [task for split in ("train", "held_out", "known") for task in project.tasks[split]]
        for _ in range(40):
            task = chance.choice(tasks)
            commands = [step.command(chance.choice(VALUES)) for step in task.steps]
            if chance.random() < 0.2:
                commands[0] = chance.choice(["./nothing red", "ls", "./sync", "cat absent"])
            found = []
            for runner in (mine, real):
                texts = [runner.reset({"task_id": task.task_id})]
                texts += [runner.call("run", {"command": command}) for command in commands]
                found.append((texts, [call.marker for call in runner.played], runner.finish()))
            assert found[0] == found[1]
        assert memo.asked > memo.played, "some of it was remembered"
        for runner in (mine, real):
            runner.close()
        memo.close()


# The memory


class Counter:
    """An environment whose state is what was done so far; it counts what it is asked."""

    made = 0

    def __init__(self) -> None:
        self.t: int | None = None
        self.done: list[Any] = []

    def reset(self, **task: Any) -> Any:
        self.t, self.done = 0, [task["name"][0]]
        return self._told(task["name"])

    def step(self, action: Any) -> Any:
        assert self.t is not None
        self.t += 1
        self.done.append(action)
        return self._told("")

    def _told(self, name: str) -> Any:
        type(self).made += 1
        return StepResult(observation={"done": list(self.done), "name": name}, reward=float(len(self.done)), done=False)

    def close(self) -> None:
        pass


def first_letter(task: Mapping[str, Any]) -> str:
    return str(task["name"][0])


def test_each_history_is_played_once_and_tasks_of_equal_files_share_it(tmp_path: Path) -> None:
    Counter.made = 0
    memo = Memo(Counter, first_letter, tmp_path / "answers.jsonl")

    def play(name: str, *actions: str) -> list[Any]:
        session = memo.session()
        return [session.reset(name=name)] + [session.step(action) for action in actions]

    assert play("ash", "x", "y")[-1].observation["done"] == ["a", "x", "y"]
    assert Counter.made == 3
    assert play("ash", "x", "y")[-1].reward == 3.0 and Counter.made == 3
    told = play("ape", "x", "y", "z")
    assert told[0].observation["name"] == "ape", "what a reset returns is each task's own"
    assert told[-1].observation["done"] == ["a", "x", "y", "z"] and Counter.made == 5
    assert play("bee", "x")[-1].observation["done"] == ["b", "x"] and Counter.made == 7
    memo.close()
    again = Memo(Counter, first_letter, tmp_path / "answers.jsonl")
    assert again.histories() == memo.histories() and len(memo.histories()) == 7
    session = again.session()
    session.reset(name="ape")
    session.step("x")
    assert session.step("y").observation["done"] == ["a", "x", "y"] and Counter.made == 7
    assert session.step("w").observation["done"] == ["a", "x", "y", "w"], "what is new is played from its beginning"


def test_a_fork_stands_where_the_episode_stood_and_is_counted() -> None:
    memo = Memo(Counter, first_letter)
    session = memo.session()
    session.reset(name="ash")
    session.step("x")
    session.step("y")
    fork = session.fork(1)
    assert memo.asked == 4 and fork.t == 1 and fork.eid != session.eid
    assert fork.step("z").observation["done"] == ["a", "x", "z"] and session.t == 2


# Figures over policies


def test_seeds_of_a_policy_are_one_value() -> None:
    found = clustered([(0, 1.0), (0, 3.0), (1, 4.0), (1, 4.0), (2, 6.0)])
    assert found.count == 3 and found.mean == 4.0 and found.deviation == 2.0
    assert found.half == pytest.approx(4.30265 * 2.0 / 3**0.5, abs=1e-4)


def test_a_target_is_reached_on_the_line_between_two_points() -> None:
    points = [(0.0, 0.1), (100.0, 0.3), (200.0, 0.2), (300.0, 0.6)]
    assert first_reached(points, 0.2) == pytest.approx(50.0)
    assert first_reached(points, 0.4) == pytest.approx(250.0)
    assert first_reached(points, 0.05) == 0.0
    assert first_reached(points, 0.7) is None


def test_a_median_counts_those_that_never_reach() -> None:
    reached = [(10.0, True), (20.0, True), (30.0, True)]
    assert censored_median([*reached, (99.0, False)]) == 20.0
    # Dropped, the two that never reach would leave 20; with them three of five have reached at 30.
    assert censored_median([*reached, (99.0, False), (99.0, False)]) == 30.0
    assert censored_median([(10.0, True), (99.0, False), (99.0, False)]) is None
    # Of four, one is lost from sight at 15: 3/4, then two remain at 20, 3/8.
    assert censored_median([(10.0, True), (15.0, False), (20.0, True), (30.0, True)]) == 20.0
    assert censored_median([]) is None


def made_run(arm: str, seed: int, rewards: list[float]) -> Run:
    found = [
        Evaluation("held_out", reward, 20, 5, {"args.invalid": 5, "no call": 1}, 10, 100 * place, 400 * place)
        for place, reward in enumerate(rewards)
    ]
    known = Evaluation("known", 0.75, 20, 0, {}, 10, 100, 400)
    return Run(arm, 0.0, 0.0, seed, "p", (), (), {"env_steps": 400.0, "wall_s": 1.0}, (*found, known))


def test_arms_are_compared_policy_by_policy() -> None:
    plan = Plan((Arm("grpo"), Arm("more", 1.0)), (0, 1, 10, 11), evaluation={"rollouts": [0, 100]})
    runs = [made_run("grpo", 0, [0.0, 0.4]), made_run("grpo", 1, [0.0, 0.6]), made_run("grpo", 10, [0.0, 0.2])]
    runs += [made_run("more", 0, [0.0, 1.0]), made_run("more", 1, [0.0, 0.8]), made_run("more", 10, [0.0, 0.1])]
    found = summary(plan, runs)
    against = found["more"]["against"]["held-out reward at the end"]
    assert against["count"] == 2 and against["mean"] == pytest.approx((0.4 - 0.1) / 2) and against["above"] == 1
    assert found["grpo"]["figures"]["held-out reward at the end"]["mean"] == pytest.approx((0.5 + 0.2) / 2)
    reaches = found["more"]["reaches"]
    assert reaches["reached"] == 1 and reaches["times"] == [(pytest.approx(100 * 0.5 / 0.9), True), (100.0, False)]
    assert reaches["median"] == pytest.approx(100 * 0.5 / 0.9), "at which half have reached"
    assert curve(runs[:2]) == [(0.0, 0.0), (100.0, 0.5)]
    shown = text(found, "grpo")
    assert "| more | 3/2 |" in shown and "1 of 2" in shown
    json.dumps(found, allow_nan=False)


# The plan


def test_the_kept_plan_has_the_runs_that_were_registered() -> None:
    plan = read_plan(ROOT / "bench" / "plans" / "projects.toml")
    assert len(plan.runs()) == 184 and plan.subject["family"] == "projects"
    assert {seed // 10 for seed in plan.seeds} == set(range(8))
    assert plan.arms[0].name == "grpo" and max(plan.evaluation["rollouts"]) == 24 * 64
    assert plan.digest(plan.arms[1]) != plan.digest(plan.arms[0]), "a run of other settings is not taken for this one"
    with pytest.raises(InvalidRequest, match="own or shuffled"):
        Arm("a", hints="none")


@pytest.mark.sandbox
def test_a_plan_of_projects_runs_end_to_end_and_its_report_can_be_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.toml"
    grpo = {
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "learning_rate": 1e-3, "num_generations": 4,
        "per_device_train_batch_size": 8, "max_completion_length": 64, "max_tool_calling_iterations": 2, "max_steps": 1,
    }  # fmt: skip
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in grpo.items())
    plan.write_text(
        f'[family]\nfamily = "projects"\nwarmup_steps = 3\n[evaluation]\nrollouts = [0]\n[grpo]\n{settings}\n'
        '[channels]\nteacher = "ema"\n[[arms]]\nname = "grpo"\n'
        '[[arms]]\nname = "shuffled"\nalpha_sdpo = 1.0\nhints = "shuffled"\nseeds = [0]\n'
        '[[arms]]\nname = "retry"\nretry = true\nseeds = [0]\n'
        '[[arms]]\nname = "random"\nbeta_replay = 0.05\nvotes = "random"\nseeds = [0]\n'
    )
    out = tmp_path / "out"
    assert cli.main([str(plan), "--out", str(out), "--seeds", "0,1"]) == 0
    printed = capsys.readouterr().out
    assert "| shuffled | 1/1 |" in printed and "| grpo | 2/1 |" in printed and "5 of 5 runs" in printed
    kept = json.loads((out / "runs.json").read_text())
    assert [[one["rollouts"] for one in run["evaluations"]] for run in kept] == [[0, 0, 8, 8]] * 5
    assert all(run["costs"]["env_steps"] >= 16 for run in kept), "a reset and an end of each rollout"
    assert kept[0]["evaluations"][:2] == kept[1]["evaluations"][:2], "arms of a seed begin alike"
    assert cli.main([str(plan), "--out", str(out), "--seeds", "0,1", "--report"]) == 0
    assert capsys.readouterr().out == printed
    plan.write_text(plan.read_text().replace("warmup_steps = 3", "warmup_steps = 3\nleast_hinted = 0.5"))
    assert cli.main([str(plan), "--out", str(tmp_path / "other"), "--seeds", "0,1"]) == 1
    assert "right behind a hint in 0.00" in capsys.readouterr().err


def test_a_dose_that_falls_is_at_its_end_in_the_last_step() -> None:
    plan = Plan((Arm("a", 5.0, alpha_end=0.0),), grpo={"max_steps": 25})
    alpha = _alpha(plan, plan.arms[0])
    assert callable(alpha) and (alpha(0), alpha(12), alpha(24)) == (5.0, 2.5, 0.0)
    with pytest.raises(InvalidRequest, match="max_steps"):
        _alpha(Plan(), plan.arms[0])
