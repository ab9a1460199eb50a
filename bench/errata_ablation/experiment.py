"""Makes all runs of a plan, one after the other, and writes the report after each."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path
from typing import Any

from errata_protocol.errors import InvalidRequest

from . import held_out, plot, records
from .boxes import Boxes
from .configured import configured
from .controlled import BoxesSubject
from .plan import TRL_SDPO, Plan
from .precondition import Precondition, precondition
from .project_subject import ProjectSubject, hinted_success
from .projects import Habits, Project
from .records import Run
from .report import ArmReport, data_of, reports, text
from .serving import terminal_of
from .training import Reporter, Subject, train
from .trl_sdpo import train_trl_sdpo
from .warmup import conversations, taught, tokenizer_of

FAMILY: Mapping[str, Any] = {"family": "boxes", "boxes": 4, "keys": 8, "belief": 0.5, "warmup_steps": 300}
FAMILY_GRPO: Mapping[str, Any] = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant",
    "per_device_train_batch_size": 16,
    "num_generations": 4,
    "max_completion_length": 96,
    "max_tool_calling_iterations": 1,
    "max_steps": 24,
}
PACKAGES = ("openenv-errata", "trl", "transformers", "torch", "openenv")


@dataclass(frozen=True, slots=True)
class Result:
    """The results of an ablation.

    Attributes:
        arms: Arms that have finished runs.
        precondition: Precondition of the controlled family; None for the user's own subject.
        wanted: Number of runs of the plan.
        finished: Number of finished runs.
        data: All results, as in ``ablation.json``.
        held_out: The tables of a family with held-out tasks.
    """

    arms: tuple[ArmReport, ...]
    precondition: Precondition | None
    wanted: int
    finished: int
    data: Mapping[str, Any]
    held_out: str | None = None

    @property
    def text(self) -> str:
        """The tables as text."""
        if self.held_out is not None:
            return f"{self.held_out}{self.finished} of {self.wanted} runs\n"
        heading = ""
        if self.precondition is not None:
            had = self.precondition
            heading = (
                f"before training, the same weights: reward {had.plain:.3f} without a hint, {had.hinted:.3f} with one; "
                f"difference {had.difference:.3f} +- {had.half:.3f} (95 % over {had.tasks} tasks, "
                f"{had.samples} episodes of each)\n\n"
            )
        return f"{heading}{text(self.arms)}{self.finished} of {self.wanted} runs\n"


def controlled_plan(plan: Plan) -> Plan:
    """Return a plan of the controlled family.

    Args:
        plan: Arms, seeds, channels and check; in ``grpo`` the differences from `FAMILY_GRPO`. Its subject is not used.
    """
    return replace(plan, subject=FAMILY, grpo={**FAMILY_GRPO, **plan.grpo})


PROJECTS: Mapping[str, Any] = {
    "family": "projects",
    "first_project": 0,
    "train": 104,
    "held_out": 104,
    "known": 24,
    "belief": 0.5,
    "garbled": 0.05,
    "misnamed": False,
    "warmup_steps": 350,
    "least_hinted": 0.0,
}
"""Defaults of a plan's ``[family]``."""


def policy_of(plan: Plan, seed: int) -> int:
    """Return the number of the policy that a run trains: for projects the seed divided by ten, else 0."""
    return seed // 10 if plan.subject.get("family") == "projects" else 0


@contextmanager
def subject_of(plan: Plan, directory: Path, say: Reporter, policy: int = 0) -> Iterator[Subject]:
    """Prepare the subject: teach the policy and start the server."""
    family = plan.subject.get("family")
    if family == "projects":
        settings = {**PROJECTS, **plan.subject}
        sizes = {split: settings[split] for split in ("train", "held_out", "known")}
        project = Project(settings["first_project"] + policy, **sizes)
        habits = Habits(settings["belief"], settings["garbled"], settings["misnamed"])
        with terminal_of(project, directory / f"project-{project.seed}") as url:
            subject = ProjectSubject(project, habits, directory, url, warmup_steps=settings["warmup_steps"], say=say)
            try:
                _check_hints(subject, settings["least_hinted"], say)
                yield subject
            finally:
                subject.close()
        return
    if family != "boxes":
        with configured(plan.subject, directory) as own:
            yield own
        return
    boxes = Boxes(plan.subject["boxes"], plan.subject["keys"], plan.subject["belief"])
    taught_policy = taught(
        lambda: conversations(boxes, 0),
        tokenizer_of(boxes),
        directory / "policies",
        steps=plan.subject["warmup_steps"],
        say=say,
    )
    with terminal_of(boxes, directory) as url:
        yield BoxesSubject(boxes, taught_policy, url)


def _check_hints(subject: ProjectSubject, least: float, say: Reporter) -> None:
    """Check before any training that the policy follows hints; without that channel 2 has nothing to teach.

    Raises:
        InvalidRequest: It follows them less often than the plan requires.
    """
    success = hinted_success(subject.model(), subject.tokenizer, subject.project)
    say(f"policy {subject.project.seed}: right behind a hint {success:.2f}")
    if success < least:
        raise InvalidRequest(
            f"policy {subject.project.seed} is right behind a hint in {success:.2f} of the tasks, and the plan wants "
            f"{least}: teach it longer (warmup_steps), or leave its seeds out"
        )


def run(
    plan: Plan,
    directory: Path,
    say: Reporter,
    *,
    command: str,
    resume: bool = True,
    only_report: bool = False,
    shown: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Make all missing runs, seed by seed, and write the report after each.

    Args:
        plan: The plan.
        directory: Directory for runs and reports.
        say: Called with each line of progress.
        command: The command line, for the report.
        resume: Keep finished runs; without it all runs are made again.
        only_report: Make no run.
        shown: Called with each report.

    Raises:
        InvalidRequest: The directory has runs of another plan, or a trainer cannot run the plan.
        ServiceError: The server did not start, or all episodes were lost.
    """
    if TRL_SDPO in plan.arms and plan.subject.get("family") != "boxes":
        raise InvalidRequest("the arm trl-sdpo is for the controlled family: TRL's SDPOTrainer has no environments")
    digest = plan.digest()
    wanted = plan.runs()
    done = {
        (arm.name, seed): records.read(directory, arm.name, seed, plan.digest(arm)) for arm, seed in wanted if resume
    }
    finished = [one for one in done.values() if one is not None]
    missing = [(arm, seed) for arm, seed in wanted if done.get((arm.name, seed)) is None]
    say(f"{len(finished)} of {len(wanted)} runs are there already" if finished else f"{len(wanted)} runs")
    had = _kept_precondition(directory, digest)
    if not missing or only_report:
        return _report(plan, directory, finished, had, command, len(wanted))
    directory.mkdir(parents=True, exist_ok=True)
    number = len(finished)
    for policy, own in groupby(missing, key=lambda one: policy_of(plan, one[1])):
        with subject_of(plan, directory, say, policy) as subject:
            if had is None and isinstance(subject, BoxesSubject):
                say("precondition: the taught policy with and without hints")
                had = precondition(subject)
                _write(directory / "precondition.json", json.dumps({"plan": digest, **asdict(had)}))
            for arm, seed in own:
                number += 1
                began, place = time.monotonic(), f"run {number}/{len(wanted)}, {arm.name} seed {seed}"

                def report(line: str, place: str = place) -> None:
                    say(f"{place}: {line}")

                if arm == TRL_SDPO:
                    assert isinstance(subject, BoxesSubject)
                    made = train_trl_sdpo(plan, subject, arm, seed, report)
                else:
                    made = train(plan, subject, arm, seed, report)
                records.write(made, directory)
                finished.append(made)
                report(f"finished in {time.monotonic() - began:.0f} s")
                if not plan.evaluation:  # a plot of many arms takes longer to draw than a run takes for a step
                    shown(_report(plan, directory, finished, had, command, len(wanted)))
    return _report(plan, directory, finished, had, command, len(wanted))


def _kept_precondition(directory: Path, digest: str) -> Precondition | None:
    path = directory / "precondition.json"
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    return Precondition(**kept) if kept.pop("plan") == digest else None


def _report(
    plan: Plan, directory: Path, runs: list[Run], had: Precondition | None, command: str, wanted: int
) -> Result:
    arms = tuple(reports(plan, runs))
    held = held_out.summary(plan, runs) if plan.evaluation else None
    data = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": {"processors": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in PACKAGES},
        "plan": {"digest": plan.digest(), **asdict(plan)},
        "precondition": None if had is None else asdict(had),
        "runs": {"wanted": wanted, "finished": len(runs)},
        "arms": data_of(arms) if held is None else held,
    }
    tables = None if held is None else held_out.text(held, plan.arms[0].name)
    result = Result(arms, had, wanted, len(runs), data, tables)
    _write(directory / "ablation.json", json.dumps(data, indent=1, default=str) + "\n")
    _write(directory / "ablation.txt", result.text)
    if held:
        held_out.draw(held, directory / "ablation.png", f"plan {plan.digest()}, {len(runs)} of {wanted} runs")
        _write(directory / "runs.json", records.compact(runs))
    elif runs:
        made = f"{command}\nplan {plan.digest()}, {len(runs)} of {wanted} runs, 95 % intervals over seeds (t)"
        plot.draw(plan, runs, directory / "ablation.png", made)
    return result


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(content)
    part.replace(path)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
