"""`errata ablate`: what a run keeps, what the tables say of it, and that the arm without channels is plain GRPO."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from scripted import Scripted, call
from trl import GRPOConfig, GRPOTrainer

from errata_ablation import (
    ARMS,
    Batch,
    Plan,
    Run,
    cli,
    interval,
    read_plan,
    records,
    reports,
    seeds_needed,
)
from errata_ablation.boxes import BOXES, KEYS, Boxes, hint_of, lessons
from errata_ablation.experiment import FAMILY_GRPO, controlled_plan
from errata_ablation.report import data_of, text
from errata_ablation.serving import terminal_of
from errata_ablation.statistics import t_quantile
from errata_ablation.teachers import BoxTeachers
from errata_ablation.training import DEFAULTS, RecordedTrainer, train
from errata_ablation.warmup import tokenizer_of
from errata_protocol.errors import InvalidRequest
from errata_protocol.rollouts import ErrorMarker
from errata_server.process import ServerProcess
from errata_trainer import Call, DpoPair, Rollout, Turn
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.episodes.playing import EpisodeRunner
from errata_trainer.episodes.tools import of_spec, published
from errata_trainer.hints import TemplateHinter
from errata_trainer.recipes.trl import environment_factory
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC
from tests.hangs import HANGS_S

TEXTS = [call("read", path="green"), "the word is owl no file", "Find it. One of red, green, blue holds a word."]
GRPO: dict[str, Any] = {
    "use_cpu": True, "bf16": False, "learning_rate": 1e-3, "per_device_train_batch_size": 4, "num_generations": 4,
    "max_completion_length": 128, "max_steps": 2, "gradient_checkpointing": False,
}  # fmt: skip


def digits(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that a policy which knows nothing earns more or less of, so that GRPO has something to learn."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class OwnPairs(PairSource):
    """Prefers what a batch's first row did to what its others did."""

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        turns = [rollout.completion_ids[rollout.turns[0].start : rollout.turns[0].stop] for rollout in rollouts]
        self.made = [DpoPair(rollouts[0].prompt_ids, turns[0], other) for other in turns[1:] if other != turns[0]]

    def sample(self, count: int, referred: Callable[[Any], list[DpoPair]]) -> list[DpoPair]:
        return referred(self.made[:count])

    def metrics(self) -> dict[str, float]:
        return {"teacher_calls": 12.0}


def pairs_of(seed: int) -> OwnPairs:
    """What the plan's file below names as the factory of its pairs."""
    del seed
    return OwnPairs()


class Shelf:
    """The subject: an untaught policy at a shelf of files."""

    def __init__(self, url: str, *, rewarded: bool = False) -> None:
        self.url, self.rewarded = url, rewarded
        self.tokenizer = tiny_tokenizer(TEXTS)
        self.models: list[Any] = []

    def trained(self, seed: int) -> dict[str, Any]:
        self.models.append(tiny_model(self.tokenizer))
        rows = [{"prompt": [{"role": "user", "content": f"{n}. "}], "place": "red", "word": "owl"} for n in range(3)]
        return {
            "model": self.models[-1],
            "processing_class": self.tokenizer,
            "train_dataset": Dataset.from_list(rows),
            "environment_factory": environment_factory(self.url, of_spec(SPEC)),
            **({"reward_funcs": [digits]} if self.rewarded else {}),
        }

    def pairs(self, seed: int) -> OwnPairs:
        return pairs_of(seed)


class ScriptedRun(Scripted, RecordedTrainer):  # type: ignore[misc]
    def script(self, row: int, turn: int) -> str:
        looks = [call("read", path="red"), call("read", path="green")][row % 2]
        return [looks, call("submit", word="owl" if row < 3 else "elk"), "done"][turn]


def quiet(line: str) -> None:
    pass


# One run


def test_the_arm_without_channels_is_grpo_bit_for_bit(server: ServerProcess, tmp_path: Path) -> None:
    subject = Shelf(server.url, rewarded=True)
    plan = Plan(seeds=(3,), grpo={**GRPO, "max_completion_length": 12})
    run = train(plan, subject, ARMS[0], 3, quiet)
    plain = GRPOTrainer(
        args=GRPOConfig(**{**DEFAULTS, **plan.grpo, "output_dir": str(tmp_path), "seed": 3}), **subject.trained(3)
    )
    plain.train()
    logged = [row for row in plain.state.log_history if "loss" in row]
    assert [row["loss"] for row in run.losses] == [row["loss"] for row in logged]
    assert [row["grad_norm"] for row in run.losses] == [row["grad_norm"] for row in logged]
    assert any(row["grad_norm"] > 0.0 for row in logged), "or there was nothing to be equal in"
    ours, theirs = (list(model.parameters()) for model in subject.models)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_run_keeps_rewards_errors_by_turn_losses_and_costs(server: ServerProcess) -> None:
    subject = Shelf(server.url)
    plain, everything = (
        train(Plan(grpo=GRPO), subject, arm, 0, quiet, trainer_class=ScriptedRun) for arm in (ARMS[0], ARMS[3])
    )
    for run in (plain, everything):
        assert [batch.rewards for batch in run.batches] == [(1.0, 1.0, 1.0, 0.0)] * 2
        assert [batch.acted for batch in run.batches] == [(4, 4)] * 2
        assert [batch.failed for batch in run.batches] == [(2, 0)] * 2, "two look where there is no file"
        assert run.rollouts == 8 and run.mean("errors") == 0.5 and run.mean("errors", 1) == 0.0
    assert plain.loss("loss/sdpo_kl") is None and plain.costs["loss_passes"] == 2.0
    assert everything.loss("loss/sdpo_kl") is not None and everything.loss("loss/trace_replay_dpo") is not None
    # Each step makes one pass of GRPO, two of the teacher (a site each), and one over all pairs with their reference.
    assert everything.costs["loss_passes"] > 2 * (1 + 2) and everything.costs["teacher_calls"] == 12.0
    assert everything.costs["sampling_passes"] == 0.0, "a script samples nothing"


def test_a_finished_run_is_read_back_and_one_of_another_plan_is_refused(tmp_path: Path) -> None:
    run = made_run("grpo", 0, [0.0, 1.0])
    records.write(run, tmp_path)
    assert records.read(tmp_path, "grpo", 0, "p") == run
    assert records.read(tmp_path, "grpo", 1, "p") is None
    with pytest.raises(InvalidRequest, match="another plan"):
        records.read(tmp_path, "grpo", 0, "q")
    records.path_of(tmp_path, "grpo", 1).with_suffix(".part").write_text("{")  # its process was killed here
    assert records.read(tmp_path, "grpo", 1, "p") is None


# All runs


def plan_file(directory: Path, url: str) -> Path:
    tokenizer = tiny_tokenizer(TEXTS)
    tiny_model(tokenizer).save_pretrained(directory / "policy")
    tokenizer.save_pretrained(directory / "policy")
    (directory / "rows.jsonl").write_text('{"prompt": "A. ", "place": "red", "word": "owl"}\n')
    path = directory / "plan.toml"
    grpo = "\n".join(f"{name} = {json.dumps(value)}" for name, value in {**GRPO, "max_completion_length": 8}.items())
    path.write_text(
        f'[policy]\nmodel = {json.dumps(str(directory / "policy"))}\ndtype = "float32"\n'
        f'[environment]\nspec = "tests.environments.shelf:SPEC"\nurl = "{url}"\n'
        f'[tasks]\nrows = "rows.jsonl"\n[pairs]\nfactory = "test_ablation:pairs_of"\n[grpo]\n{grpo}\n'
    )
    return path


def test_the_command_makes_the_missing_runs_only(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = plan_file(tmp_path, server.url), tmp_path / "out"
    given = [str(path), "--out", str(out), "--steps", "1", "--json"]
    assert cli.main([*given, "--seeds", "1", "--arms", "grpo"]) == 0
    capsys.readouterr()
    first = records.path_of(out, "grpo", 0)
    kept = first.stat().st_mtime_ns
    assert cli.main([*given, "--seeds", "2", "--arms", "grpo", "grpo+dpo"]) == 0
    told = capsys.readouterr()
    assert first.stat().st_mtime_ns == kept
    assert "1 of 4 runs are there already" in told.err and "run 4/4, grpo+dpo seed 1" in told.err
    data = json.loads(told.out)
    assert data == json.loads((out / "ablation.json").read_text())
    assert [(arm["name"], arm["seeds"], arm["rollouts"]) for arm in data["arms"]] == [
        ("grpo", [0, 1], [4, 4]), ("grpo+dpo", [0, 1], [4, 4]),
    ]  # fmt: skip
    assert data["plan"]["grpo"]["max_steps"] == 1 and data["versions"]["trl"] and "ablate" in data["command"]
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG") and "4 of 4 runs" in (
        out / "ablation.txt"
    ).read_text()
    assert cli.main([str(path), "--out", str(out), "--steps", "2"]) == 1
    assert "another plan" in capsys.readouterr().err


def test_a_plan_says_what_is_wrong_with_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    for content, told in (
        ("[policy]\n[tasks]\n", r"\[environment\] is missing"),
        ("[policy]\n[environment]\n[tasks]\n[grop]\n", "no table 'grop'"),
        ("[policy]\n[environment]\n[tasks]\n[[arms]]\nname = 'a'\nalpha = 1\n", "an arm has name, alpha_sdpo"),
        ("[policy", "plan.toml"),
    ):
        path.write_text(content)
        with pytest.raises(InvalidRequest, match=told):
            read_plan(path)
    with pytest.raises(InvalidRequest, match="only once"):
        Plan(seeds=(1, 1))


def test_a_plan_without_a_subject_sets_what_it_likes_of_the_controlled_family(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('[experiment]\nseeds = [4]\n[channels]\ndpo_reference = "initial"\n[grpo]\nlearning_rate = 1e-4\n')
    plan = controlled_plan(read_plan(path))
    assert plan.subject["family"] == "boxes" and plan.seeds == (4,) and plan.arms == ARMS
    assert plan.channels == {"dpo_reference": "initial"}
    assert plan.grpo == {**FAMILY_GRPO, "learning_rate": 1e-4}
    path.write_text('[pairs]\nfactory = "a:b"\n')
    with pytest.raises(InvalidRequest, match=r"\[policy\] is missing"):
        read_plan(path)


def test_an_arm_sets_which_tokens_channel_2_compares(server: ServerProcess, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        '[[arms]]\nname = "turn"\nalpha_sdpo = 1.0\n\n'
        '[[arms]]\nname = "calls"\nalpha_sdpo = 1.0\nchannels = { sdpo_targets = "calls" }\n'
    )
    arms = controlled_plan(read_plan(path)).arms
    compared: dict[str, set[str]] = {}
    for arm in arms:
        texts = compared[arm.name] = set()

        class Kept(ScriptedRun):  # type: ignore[misc]
            def compute_loss(self, model: Any, inputs: Any, *rest: Any, texts: set[str] = texts, **named: Any) -> Any:
                texts |= {self.processing_class.decode(i.target_ids) for row in inputs["sdpo_items"] for i in row}
                return super().compute_loss(model, inputs, *rest, **named)

        train(Plan(grpo={**GRPO, "max_steps": 1}), Shelf(server.url), arm, 0, quiet, trainer_class=Kept)
    assert compared == {"turn": {call("read", path="green") + END}, "calls": {call("read", path="green")}}


def test_arms_and_seeds_can_be_added_to_a_plan_and_nothing_else() -> None:
    plan = Plan(grpo=GRPO)
    assert plan.digest() == Plan(ARMS[:2], (7,), grpo=GRPO).digest()
    assert plan.digest() != Plan(grpo={**GRPO, "max_steps": 3}).digest()


# What they say


def made_run(arm: str, seed: int, rewards: Sequence[float | None]) -> Run:
    batches = tuple(Batch((reward,), (1,), (int(not reward),), 10) for reward in rewards)
    return Run(arm, 0.0, 0.0, seed, "p", batches, ({"loss": 0.25, "step": 1.0},), {"wall_s": 2.0})


def test_arms_are_compared_seed_by_seed() -> None:
    runs = [made_run("grpo", seed, [0.0, first]) for seed, first in enumerate((0.0, 0.5, 1.0))]
    runs += [made_run("all", seed, [1.0, first]) for seed, first in enumerate((0.1, 0.4, 1.0))]
    runs.append(made_run("grpo+sdpo", 0, [0.0, None]))
    grpo, sdpo, everything = reports(Plan(), runs)
    assert grpo.figures["reward"].mean == pytest.approx(0.25) and not grpo.against
    found = everything.against["reward"]
    assert found.difference.mean == pytest.approx(0.5) and found.difference.deviation == pytest.approx(0.05)
    assert found.seen and found.seeds_needed == 2
    assert not sdpo.against["reward"].seen and sdpo.against["reward"].seeds_needed is None, "of one seed"
    assert sdpo.lost == 1 and sdpo.figures["reward"].mean == 0.0
    shown = text([grpo, sdpo, everything])
    assert "all - grpo" in shown and "0.500 +- 0.124" in shown and "yes; 2" in shown and "lost: 1" in shown
    json.dumps(data_of([grpo, sdpo, everything]), allow_nan=False)


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 4, 2.7764),
        (0.95, 7, 1.8946),
        (0.8, 9, 0.8834),
        (0.05, 30, -1.6973),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(share: float, freedom: int, value: float) -> None:
    assert t_quantile(share, freedom) == pytest.approx(value, abs=5e-5)


def test_a_mean_has_the_interval_of_its_seeds() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.deviation) == (2.0, 1.0) and found.half == pytest.approx(4.3027 / 3**0.5, abs=1e-4)
    assert interval([2.0]).half == float("inf")
    with pytest.raises(ValueError, match="no seed"):
        interval([])


def test_seeds_needed_are_more_the_smaller_the_effect() -> None:
    # G*Power's paired t test, two-sided 5 %, power 80 %: 34 for an effect of half a deviation, 10 for one of a whole.
    assert seeds_needed(interval([0.0, 1.0, 2.0])) == 10
    half = seeds_needed(interval([-0.5, 0.5, 1.5]))
    assert half is not None and abs(half - 34) <= 1
    assert seeds_needed(interval([-1.0, 1.0])) is None and seeds_needed(interval([1.0])) is None


# The controlled family


def test_the_program_complains_as_the_lessons_say_and_the_hint_names_the_key(tmp_path: Path) -> None:
    family = Boxes(boxes=2)
    family.write(tmp_path)
    box, key = next(iter(family.answers.items()))
    wrong = next(one for one in KEYS if one != key)
    program = tmp_path / family.task_id(box) / "environment" / "open"
    refused = subprocess.run([program, wrong], cwd=tmp_path, capture_output=True, text=True, timeout=HANGS_S)
    assert (refused.returncode, refused.stderr) == (2, Boxes.complaint(wrong, key))
    assert not (tmp_path / "opened").exists()
    assert subprocess.run([program, key], cwd=tmp_path, capture_output=True, timeout=HANGS_S).returncode == 0
    assert (tmp_path / "opened").exists()
    hint = hint_of(wrong, key, TemplateHinter())
    assert f"(choose from {key})" in hint and hint.startswith("Hint for your next action: ")


def test_lessons_tell_no_boxs_key() -> None:
    family = Boxes()
    told: dict[bool, list[bool]] = {True: [], False: []}
    for lesson in islice(lessons(family, 0), 3000):
        asked = lesson.messages[0]["content"].split("\n")[0]
        box = next(box for box in BOXES if asked == Boxes.instruction(box))
        if box in family.answers:
            hinted = "Hint for" in lesson.messages[-1]["content"]
            told[hinted].append(lesson.command == Boxes.command(family.answers[box]))
    hinted, plain = (sum(right) / len(right) for right in (told[True], told[False]))
    assert abs(hinted - 1 / family.keys) < 0.04, "a hint names the key of its box as often as chance has it"
    assert abs(plain - (1 - family.belief) / family.keys) < 0.04, "and without one the student believes in another"
    assert all(family.believed(box) != key for box, key in family.answers.items())


def test_teachers_of_limited_trust_vote_on_first_turns_that_failed() -> None:
    family = Boxes()
    tokenizer = tokenizer_of(family)
    (end,) = tokenizer.encode(END)
    box, key = next((box, key) for box, key in family.answers.items() if key != "red")
    runners, rollouts = [], []
    for command in (Boxes.command("red"), Boxes.command(key)):
        said = [*tokenizer.encode(call("run", command=command)), end]
        marker = ErrorMarker(error_kind="invalid_arguments", hint_template_key="args.invalid", severity="error")
        made = Call("run", {"command": command}, 1, marker if "red" in command else None)
        rollouts.append(Rollout((1, 2), tuple(said), (1,) * len(said), (Turn(0, 0, len(said), (made,)),)))
        runner = EpisodeRunner(published("terminal"), lambda: None)  # type: ignore[arg-type, return-value]
        runner.record.begin({"task_id": family.task_id(box)})
        runners.append(runner)
    found = []
    for seed in range(40):
        teachers = BoxTeachers(family, seed)
        teachers.use(tokenizer, [end], "policy")
        teachers.observe([*rollouts, rollouts[0]], [*runners, runners[0]], None)  # type: ignore[arg-type]
        assert teachers.metrics()["teacher_calls"] == 3.0, "a box asked about once more costs nothing"
        found += teachers.sample(1, list)
    assert found and all(pair.context_ids == (1, 2) for pair in found)
    assert {pair.rejected_ids for pair in found} == {rollouts[0].completion_ids}
    right = sum(pair.chosen_ids == rollouts[1].completion_ids for pair in found)
    assert right > 0.8 * 40, "two of three agree on the key with a chance of 0.9, on a wrong one hardly ever"


@pytest.mark.sandbox
def test_the_real_terminal_marks_a_wrong_key_and_rewards_the_right_one(tmp_path: Path) -> None:
    family = Boxes(boxes=1)
    ((box, key),) = family.answers.items()
    wrong = next(one for one in KEYS if one != key)
    with terminal_of(family, tmp_path) as url:
        runner = environment_factory(url, tools=["run"])()._runner
        task = {"task_id": family.task_id(box)}
        rewards = []
        for tried in (wrong, key):
            assert runner.reset(task) == Boxes.instruction(box)
            runner.call("run", {"command": Boxes.command(tried)})
            rewards.append(runner.finish())
            if tried == wrong:
                (made, _) = runner.played
                assert made.marker is not None and made.marker.hint_template_key == "args.invalid"
                assert made.text == f"[stderr]\n{Boxes.complaint(wrong, key)}[exit 2]"
        runner.close()
    assert rewards == [0.0, 1.0]
