"""Every bundled task on real sandboxes: solved is 1, untouched and degenerate 0, unfinished between, twice the same."""

from __future__ import annotations

import re

import pytest

from errata_protocol.payload import encode_payload, semantic_digest
from errata_server.sandbox.base import Backend
from terminal_env import TerminalAction, TerminalObservation
from terminal_env.server.environment import TerminalEnvironment
from terminal_env.server.layers import task_layers
from terminal_env.server.tasks import Task, load_tasks

from .answers import FIGURES, TOLERANCE, Answer, answers, bundled_tasks, figures, named_paths, played, trivial

pytestmark = [pytest.mark.tasks, pytest.mark.sandbox]
TASKS = bundled_tasks()
ANSWERS = {name: answers(name) for name in TASKS}
DONE = TerminalAction(tool="submit")
ELSEWHERE = {
    *("says that it is done", "ends its shell with 0", "ends its shell with 1"),
    *(f"chmod -R {bits}" for bits in ("755", "750", "640", "600", "u=rwX,g=rX,o=")),
}
"""Trivial answers that are played on few tasks."""


def solution(task: Task) -> TerminalAction:
    return TerminalAction(command=(task.root / "solution" / "solve.sh").read_text())


def cheap(name: str) -> list[Answer]:
    """Return the trivial answers that are played on a task: on the first all, on others those that could matter there.

    What ends its shell or speaks of success matters to the environment and not to a verifier, and most modes matter
    to verifiers that look at modes.
    """
    verifier = (TASKS[name].root / "tests" / "verify.py").read_text("utf-8")
    whole = name == next(iter(TASKS)) or re.search(r"mode|permission", verifier)
    found = trivial(TASKS[name])
    return found if whole else [answer for answer in found if answer.name not in ELSEWHERE]


async def play(task: Task, *actions: TerminalAction) -> tuple[list[TerminalObservation], str]:
    environment = TerminalEnvironment()
    observations = [await environment.reset_async(seed=1, episode_id="e", task_id=task.id)]
    observations += [await environment.step_async(action) for action in actions]
    detail = environment.verdict.detail if environment.verdict else ""
    await environment.aclose()
    return observations, detail


def test_tasks_of_many_skills_are_bundled() -> None:
    assert len(TASKS) >= 16
    assert len({task.metadata["category"] for task in TASKS.values()}) >= 14
    assert not load_tasks().broken


@pytest.mark.parametrize("name", TASKS)
def test_every_bundled_task_has_degenerate_and_unfinished_answers(name: str) -> None:
    assert len({answer.name for answer in ANSWERS[name]}) == len(ANSWERS[name])
    assert sum(answer.score == 0.0 for answer in ANSWERS[name]) >= 5
    assert sum(0.0 < answer.score < 1.0 for answer in ANSWERS[name]) >= 2


@pytest.mark.parametrize("name", TASKS)
def test_trivial_answers_are_made_from_the_instruction(name: str) -> None:
    assert named_paths(TASKS[name].instruction), "no path to make trivial answers for"


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(("name", "index"), [(name, i) for name, found in ANSWERS.items() for i in range(len(found))])
async def test_an_answer_is_worth_what_is_written_down(name: str, index: int) -> None:
    """Degenerate answers exactly 0, honest and unfinished ones their share."""
    answer = ANSWERS[name][index]
    reward, detail = await played(TASKS[name], answer)
    if answer.score == 0.0:
        assert reward == 0.0, f"{answer.name}: {detail}"
    else:
        assert reward == pytest.approx(answer.score, abs=TOLERANCE), f"{answer.name}: {detail}"


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("name", TASKS)
async def test_trivial_answers_score_nothing(name: str) -> None:
    found = {answer.name: await played(TASKS[name], answer) for answer in cheap(name)}
    assert {name: score for name, (score, _) in found.items()} == dict.fromkeys(found, 0.0)
    assert found["does nothing"][1], "the verdict says what is missing"


@pytest.mark.usefixtures("real")
async def test_submitting_at_once_scores_nothing_and_says_what_is_missing() -> None:
    (_, end), detail = await play(next(iter(TASKS.values())), DONE)
    assert end.reward == 0.0 and detail


def test_the_committed_figures_are_of_these_tasks_and_answers() -> None:
    assert FIGURES.read_text("utf-8") == figures(), "run scripts/task_answers.py"


@pytest.mark.parametrize("name", TASKS)
async def test_the_reference_solution_scores_one_and_gives_the_same_bytes_twice(name: str, real: Backend) -> None:
    look = TerminalAction(command="find . -printf '%p %m %T@ %s %l\\n' | grep -v '/[.]git/index ' | sort; cat nothing")
    actions = (look, solution(TASKS[name]), DONE)

    def digests(observations: list[TerminalObservation]) -> list[str | None]:
        return [
            semantic_digest(
                encode_payload({"observation": o.model_dump(mode="json"), "reward": o.reward, "done": o.done}),
                TerminalObservation.VOLATILE_FIELDS,
            )
            for o in observations
        ]

    first, detail = await play(TASKS[name], *actions)
    *_, solved, end = first
    assert solved.exit_code == 0 and solved.error_kind is None, solved.stderr
    assert (end.reward, end.done) == (1.0, True), detail
    if TASKS[name].deterministic:
        task_layers(real).forget(TASKS[name])  # so that its start is made again too
        again, _ = await play(TASKS[name], *actions)
        assert digests(first) == digests(again)


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("name", TASKS)
async def test_no_start_shows_how_it_is_graded(name: str) -> None:
    everywhere = "cat $(find / -xdev -newermt 2025-12-31 -type f -size -200k 2>/dev/null) 2>/dev/null | grep -c"
    (_, seen, mounts), _ = await play(
        TASKS[name],
        TerminalAction(command=f"{everywhere} errata_verify; ls /verifier /tests /probe /setup /logs"),
        TerminalAction(command="cat /proc/self/mounts"),
    )
    assert seen.stdout.split() == ["0"], seen.stdout
    assert not re.search(r"/(verifier|tests|probe|setup|logs)\b", mounts.stdout)


async def test_two_builds_of_a_start_are_equal(real: Backend) -> None:
    task = TASKS["git-lost-commit"]
    seen = []
    for _ in range(2):
        task_layers(real).forget(task)
        sandbox = await real.restore(await task_layers(real).start(real, task))
        seen.append(await sandbox.merged_digest())
        await sandbox.destroy()
    assert seen[0] == seen[1]
