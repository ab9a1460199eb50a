"""The channels inside TRL's trainer, on real episodes: against a slow implementation, and against `GRPOTrainer`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from scripted import Scripted, call, config
from slow import slow_dpo, slow_sdpo
from transformers import TrainerCallback
from trl import GRPOTrainer

from errata_server.process import ServerProcess
from errata_trainer import DpoPair
from errata_trainer.assembly.checkpoints import ChannelState
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.assembly.losses import ChannelLosses
from errata_trainer.assembly.pair_source import PairSource
from errata_trainer.channels.schedules import linear
from errata_trainer.episodes.tools import of_spec
from errata_trainer.hints import FailedTurn, FeedbackHinter, Hint
from errata_trainer.monitoring.watch import Watch
from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import tiny_model, tiny_tokenizer
from tests.environments.shelf import SPEC

pytestmark = pytest.mark.training

SHELF = of_spec(SPEC)
TEXTS = [call("read", path="green"), "the word is owl no file", "Find it. One of red, green, blue holds a word."]


class Trainer(Scripted, ThreeChannelGRPOTrainer):  # type: ignore[misc]
    """Keeps what it computed, micro-batch by micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seen: list[dict[str, Any]] = []
        self.passes = 0
        super().__init__(*args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        plain = GRPOTrainer.compute_loss(self, model, inputs).detach()
        passes = self.passes
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        self.seen.append({"inputs": inputs, "plain": plain, "loss": loss.detach(), "passes": self.passes - passes})
        return loss


class PlainTrainer(Scripted, GRPOTrainer):  # type: ignore[misc]
    pass


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer(TEXTS)


class Pairs(PairSource):
    """Pairs made of the batch's own turns: what row n did at its first turn is chosen over what row n + 1 did."""

    def __init__(self) -> None:
        self.rollouts: list[Any] = []
        self.batches = 0

    def observe(self, rollouts: Any, runners: Any, transcripts: Any) -> None:
        self.rollouts = list(rollouts)
        self.batches += 1

    def sample(self, count: int, referred: Callable[[Any], list[DpoPair]]) -> list[DpoPair]:
        made = []
        for one, other in zip(self.rollouts, self.rollouts[1:], strict=False):
            chosen, rejected = (r.completion_ids[r.turns[0].start : r.turns[0].stop] for r in (one, other))
            if chosen != rejected:
                made.append(DpoPair(one.prompt_ids, chosen, rejected, weight=0.5 + len(made)))
        return referred(made[:count])

    def metrics(self) -> dict[str, float]:
        return {"made": 1.0}


def scripts(*rows: list[str]) -> Callable[[int, int], str]:
    return lambda row, turn: rows[row % len(rows)][turn]


ONE_SITE = [call("read", path="green"), call("submit", word="owl"), "done"]
TWO_SITES = [call("read", path="green"), call("read", path="blue"), call("submit", word="elk"), "I am done with it"]
FOUR_SITES = [*[call("read", path=p) for p in ("green", "blue", "gray", "x")], call("submit", word="owl"), "done"]
NO_SITE = [call("read", path="red"), call("submit", word="owl"), "done"]
BAD_CALL = [call("read", file="red"), call("submit", word="owl"), "done"]
CUT = [call("read", path="green"), call("read", path="blue"), "word " * 400]


def made(
    tokenizer: Any, url: str, path: Path, script: Any, cls: Any = Trainer, *, peft: Any = False, **changes: Any
) -> Any:
    ours = ("alpha_sdpo", "beta_replay", "pairs", "settings", "hinter", "check")
    own = {name: changes.pop(name) for name in ours if name in changes}
    model = tiny_model(tokenizer)
    with torch.no_grad():  # or all ids are about as likely, and every divergence is next to nothing
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0 if "embed" in name else 10.0)
    if peft is not False and peft is not True:
        own["peft_config"] = peft
    elif peft:
        from peft import LoraConfig

        own["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    prompts = [[{"role": "user", "content": text}] for text in ("A. ", "Find it. ") * 4]
    rows = [{"prompt": prompt, "place": "red", "word": "owl"} for prompt in prompts]
    trainer = cls(
        model=model,
        processing_class=tokenizer,
        args=config(path, **changes),
        train_dataset=Dataset.from_list(rows),
        environment_factory=environment_factory(url, SHELF),
        **own,
    )
    trainer.script = script
    base = trainer.accelerator.unwrap_model(trainer.model)
    inner = base.get_base_model() if hasattr(base, "get_base_model") else base
    inner.model.register_forward_hook(lambda *_: setattr(trainer, "passes", getattr(trainer, "passes", 0) + 1))
    return trainer


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "script",
    [
        scripts(ONE_SITE, NO_SITE),
        scripts(TWO_SITES, ONE_SITE, NO_SITE, BAD_CALL),
        scripts(FOUR_SITES, CUT, TWO_SITES, NO_SITE),
    ],
    ids=["1", "2", "4"],
)
def test_a_real_batchs_loss_is_the_slow_ones(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, script: Any, accumulation: int, peft: bool
) -> None:
    trainer = made(
        tokenizer, server.url, tmp_path, script, peft=peft, pairs=Pairs(), alpha_sdpo=0.7, beta_replay=0.3,
        per_device_train_batch_size=8 // accumulation, num_generations=4, gradient_accumulation_steps=accumulation,
        learning_rate=0.0, max_completion_length=260,
    )  # fmt: skip
    trainer.train()
    assert len(trainer.seen) == accumulation
    inputs = [seen["inputs"] for seen in trainer.seen]
    tokens = sum(len(item.target_ids) for batch in inputs for row in batch["sdpo_items"] for item in row)
    pairs = sum(len(row) for batch in inputs for row in batch["dpo_pairs"])
    assert tokens and pairs
    total = 0.0
    for seen in trainer.seen:
        sdpo = slow_sdpo(trainer.model, seen["inputs"], tokenizer, jsd_beta=0.5, clip=10.0) / tokens
        dpo = slow_dpo(trainer.model, seen["inputs"], beta_dpo=0.1) / pairs
        total += sdpo
        assert float(seen["loss"] - seen["plain"]) == pytest.approx(0.7 * sdpo + 0.3 * dpo, rel=1e-5, abs=1e-5)
    assert total > 0.01, "or being equal says little"


def test_the_logged_parts_add_up_to_the_logged_loss_however_the_step_is_cut(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    parts = ("loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo", "sdpo/tokens", "dpo/pairs", "sdpo/divergence")
    logs = []
    for accumulation in (1, 2, 4):
        trainer = made(
            tokenizer, server.url, tmp_path / str(accumulation), scripts(TWO_SITES, ONE_SITE, NO_SITE, BAD_CALL),
            pairs=Pairs(), alpha_sdpo=0.7, beta_replay=0.3, per_device_train_batch_size=8 // accumulation,
            num_generations=4, gradient_accumulation_steps=accumulation, learning_rate=0.0,
        )  # fmt: skip
        trainer.train()
        (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
        total = log["loss/grpo"] + 0.7 * log["loss/sdpo_kl"] + 0.3 * log["loss/trace_replay_dpo"]
        assert log["loss"] == pytest.approx(total, abs=1e-4) and log["loss/sdpo_kl"] > 0.01
        by_key = [value for name, value in log.items() if name.startswith("sdpo/share/")]
        assert len(by_key) == 2 and sum(by_key) == pytest.approx(1.0)
        logs.append({name: log[name] for name in parts})
    assert logs[1] == pytest.approx(logs[0], abs=1e-3) and logs[2] == pytest.approx(logs[0], abs=1e-3)


def test_a_warm_up_from_zero_keeps_the_sites_of_a_batch_that_is_used_again(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    pairs = Pairs()
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(ONE_SITE, NO_SITE), alpha_sdpo=lambda step: 0.5 * (step > 0),
        beta_replay=lambda step: 0.5 * (step > 1), pairs=pairs, num_iterations=2, max_steps=3,
    )  # fmt: skip
    trainer.train()
    first, second, _ = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert "loss/sdpo_kl" not in first and second["loss/sdpo_kl"] > 0.0
    assert first["loss"] == pytest.approx(first["loss/grpo"], abs=1e-6)
    assert pairs.batches == 2, "teachers are asked before the channel has a weight: their answers take a while"
    assert "dpo_pairs" not in trainer.seen[0]["inputs"]


@pytest.mark.parametrize("nll", [0.0, 0.5])
def test_the_likelihood_of_chosen_actions_is_added_to_channel_3(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, nll: float
) -> None:
    settings = ChannelSettings(dpo_nll=nll, dpo_reference="initial")
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES, NO_SITE), alpha_sdpo=0.0, beta_replay=1.0, pairs=Pairs(),
        settings=settings, learning_rate=1e-2, max_steps=2,
    )  # fmt: skip
    expected = []
    compute = trainer.compute_loss

    def slow(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = []
        for pair in [pair for row in inputs["dpo_pairs"] for pair in row]:
            ids = torch.tensor([[*pair.context_ids, *pair.chosen_ids]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(pair.context_ids) - 1 : -1].double()
            targets = torch.tensor(pair.chosen_ids)[:, None]
            now = float(torch.log_softmax(logits, -1).gather(1, targets).sum())
            ratios = [now - pair.ref_chosen]
            ids = torch.tensor([[*pair.context_ids, *pair.rejected_ids]])
            with torch.no_grad():
                logits = model(input_ids=ids).logits[0, len(pair.context_ids) - 1 : -1].double()
            targets = torch.tensor(pair.rejected_ids)[:, None]
            ratios.append(float(torch.log_softmax(logits, -1).gather(1, targets).sum()) - pair.ref_rejected)
            dpo = math.log1p(math.exp(-0.1 * (ratios[0] - ratios[1])))
            found.append(pair.weight * (dpo - nll * ratios[0] / len(pair.chosen_ids)))
        expected.append(sum(found) / len(found))
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = slow
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["loss/trace_replay_dpo"] for log in logs] == pytest.approx(expected, rel=1e-4)
    assert all(log["dpo/chosen_nll"] > 0.0 for log in logs)
    with pytest.raises(ValueError, match="nll"):
        made(tokenizer, server.url, tmp_path, scripts(NO_SITE), settings=ChannelSettings(dpo_nll=-1.0))


def test_a_source_of_pairs_may_ask_for_their_likelihood_and_the_settings_have_the_last_word(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    class Likely(Pairs):
        nll = 0.7

    for source, asked, nll in ((Pairs(), None, 0.0), (Likely(), None, 0.7), (Likely(), 0.0, 0.0)):
        settings = ChannelSettings(dpo_nll=asked)
        trainer = made(tokenizer, server.url, tmp_path, scripts(NO_SITE), pairs=source, settings=settings)
        assert trainer._preferences.nll == nll


def test_a_lower_dose_lowers_the_weight_of_channel_2(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES), alpha_sdpo=0.8, settings=ChannelSettings(lower_dose=True)
    )
    trainer._watch.dose = 0.25
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["loss"] == pytest.approx(log["loss/grpo"] + 0.2 * log["loss/sdpo_kl"], abs=1e-6)
    assert log["sdpo/dose"] == 0.25 and log["loss/sdpo_kl"] > 0.0


def test_demonstrations_of_siblings_are_hints(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    hinter = FeedbackHinter(max_tokens=200, environment_feedback=False)
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(ONE_SITE, TWO_SITES), alpha_sdpo=1.0, hinter=hinter,
        max_completion_length=260,
    )  # fmt: skip
    trainer.train()
    assert hinter.counts["demonstration"] > 0
    (seen,) = trainer.seen
    texts = [tokenizer.decode(one.teacher_ids) for row in seen["inputs"]["sdpo_items"] for one in row]
    assert any("Another attempt at this task succeeded" in text and '"owl"' in text for text in texts)


def test_a_sampled_turn_is_parsed_with_its_tools_and_ranks_sample_equally_many(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from errata_trainer.recipes.trl import trainer as module

    trainer = made(
        tokenizer, server.url, tmp_path, scripts(NO_SITE), alpha_sdpo=1.0, check=CounterfactualCheck("always")
    )
    asked: list[Any] = []
    parsed_with: list[Any] = []

    def generate(contexts: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        asked.append(contexts)
        return [[5]] * len(contexts), None

    def parse(_: Any, ids: Any, *, prefix: Any, tools: Any) -> dict[str, Any]:
        parsed_with.append(tools)
        return {"tool_calls": [{"function": {"name": "read", "arguments": {"path": "red"}}}]}

    monkeypatch.setattr(trainer, "_generate_single_turn", generate)
    monkeypatch.setattr(module, "parse_response", parse)
    monkeypatch.setattr(module, "gather_object", lambda own: [*own, 3])  # another rank has three
    monkeypatch.setattr(trainer, "_longest_context", lambda: 4)
    assert trainer._sample([[1, 2], [1] * 5]) == [[("read", {"path": "red"})], None]
    assert [len(contexts) for contexts in asked] == [3], "as many as the rank with most"
    assert asked[0][0] == [1, 2] and [1] * 5 not in asked[0]
    assert parsed_with == [trainer.tools]
    assert trainer._sample([]) == [] and len(asked[1]) == 3


@pytest.mark.trl
def test_each_site_is_the_failing_turn_after_its_hint(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    trainer = made(tokenizer, server.url, tmp_path, scripts(TWO_SITES, NO_SITE, BAD_CALL, ONE_SITE), learning_rate=0.0)
    trainer.train()
    (inputs,) = [seen["inputs"] for seen in trainer.seen]
    found = []
    for row, items in enumerate(inputs["sdpo_items"]):
        ids = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()].tolist()
        ids += inputs["completion_ids"][row].tolist()
        for item in items:
            said = tokenizer.decode(item.target_ids)
            context = tokenizer.decode(item.teacher_ids[: -len(item.target_ids)])
            assert [ids[p + 1] for p in item.student_positions] == list(item.target_ids)
            assert [item.teacher_ids[p + 1] for p in item.teacher_positions] == list(item.target_ids)
            student = tokenizer.decode(ids[: item.student_positions[0] + 1])
            header, user = "<|im_start|>assistant\n", "<|im_start|>user\n"
            assert context.endswith(header) and context.startswith(student.removesuffix(header))
            added = context.removeprefix(student.removesuffix(header)).removesuffix(header)
            assert added.startswith(user) and added.count("<|im_start|>") == 1 and added.endswith("<|im_end|>\n")
            found.append((json.loads(said[11:].split("</tool_call>")[0])["arguments"], item.hint_template_key))
    assert sorted(found, key=str) == [
        ({"file": "red"}, "args.invalid"), ({"path": "blue"}, "fs.missing"), *[({"path": "green"}, "fs.missing")] * 2,
    ]  # fmt: skip
    log = trainer.state.log_history[0]
    assert log["sdpo/sites"] == 1.0 and log["sdpo/kept"] == 4.0 and log["sdpo/divergence"] > 0.0


class NoHint:
    """Says nothing: the teacher reads what the student read."""

    def hint(self, failed: FailedTurn) -> Hint:
        return Hint("x", "none", "0", "template")


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("teacher", "lora"),
    [
        ("ema", False),
        ("live", False),
        ("initial", False),
        ("ema", True),
        ("live", True),
        ("base", True),
        ("initial", True),
    ],
)
def test_an_empty_hint_is_no_loss(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, teacher: Any, lora: bool,
    bf16: bool, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    from peft import LoraConfig

    settings = ChannelSettings(teacher=teacher)
    # A new adapter is zero, so that its base is the student; its dropout would make a difference.
    peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.3) if lora else False
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES), hinter=NoHint(), alpha_sdpo=1.0, settings=settings,
        bf16=bf16, peft=peft,
    )  # fmt: skip
    assert ("dropout is switched off in the student" in caplog.text) is lora
    monkeypatch.setattr(trainer._driver.sites.renderer, "hint_ids", lambda text, after: ())
    trainer.train()
    (seen,) = trainer.seen
    assert sum(map(len, seen["inputs"]["sdpo_items"])) == 8
    assert abs(float(seen["loss"] - seen["plain"])) < 1e-6
    assert trainer.state.log_history[0]["sdpo/divergence"] < 1e-6


def test_a_model_whose_states_cannot_be_taken_is_refused_at_construction(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(tiny_model(tokenizer)), "hf_device_map", {"model": 0, "lm_head": 1}, raising=False)
    with pytest.raises(ValueError, match=r"spread over the devices 0, 1.*accelerate launch"):
        made(tokenizer, server.url, tmp_path, scripts(NO_SITE), alpha_sdpo=1.0)
    made(tokenizer, server.url, tmp_path, scripts(NO_SITE), alpha_sdpo=0.0, beta_replay=0.0)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="torch_compile=False"):
        made(tokenizer, server.url, tmp_path, scripts(NO_SITE), alpha_sdpo=0.0, pairs=Pairs(), torch_compile=True)


def test_the_channels_wait_for_no_device_in_a_micro_batch(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a number of the model's in Python is what waits: our part of a micro-batch reads none.

    Positions and lengths are integers that come from Python, and stay on the host.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from errata_trainer.assembly.distillation import Distillation
    from errata_trainer.assembly.preferences import Preferences

    reads: list[str] = []

    class Reads(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_local_scalar_dense" in str(function) and args[0].is_floating_point():
                reads.append(str(function))
            return function(*args, **(kwargs or {}))

    tolist, calls = torch.Tensor.tolist, []

    def read(tensor: torch.Tensor) -> Any:
        if tensor.is_floating_point():
            reads.append("tolist")
        return tolist(tensor)

    def watched(inner: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(inner.__qualname__)
            with Reads(), monkeypatch.context() as patched:
                patched.setattr(torch.Tensor, "tolist", read)
                return inner(self, *args, **kwargs)

        return call

    for cls, name in ((Distillation, "loss"), (Preferences, "loss"), (ChannelLosses, "_record_sites")):
        monkeypatch.setattr(cls, name, watched(getattr(cls, name)))
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES, ONE_SITE, NO_SITE), alpha_sdpo=1.0, beta_replay=0.5,
        pairs=Pairs(), settings=ChannelSettings(dpo_nll=0.5), gradient_accumulation_steps=2,
    )  # fmt: skip
    trainer.train()
    assert len(set(calls)) == 3 and len(calls) >= 4
    assert reads == []
    with Reads():
        float(torch.tensor(1.0))
    assert reads, "a read would have been seen"


@pytest.mark.trl
def test_with_both_weights_zero_it_is_plain_grpo_bit_for_bit(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    found = []
    told = ("loss", "grad_norm", "reward", "entropy")
    script = scripts(TWO_SITES, NO_SITE, ONE_SITE, BAD_CALL)
    for cls, given in ((PlainTrainer, {}), (Trainer, {"alpha_sdpo": 0.0, "beta_replay": 0.0, "pairs": Pairs()})):
        trainer = made(tokenizer, server.url, tmp_path, script, cls, max_steps=2, learning_rate=1e-2, **given)
        if cls is Trainer:  # the test's own second loss is no part of it
            trainer.compute_loss = lambda *a, t=trainer, **k: ThreeChannelGRPOTrainer.compute_loss(t, *a, **k)
        trainer.train()
        logs = [{k: v for k, v in log.items() if k in told} for log in trainer.state.log_history]
        found.append((logs, [p.detach().clone() for p in trainer.model.parameters()], trainer.passes))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert found[0][2] == found[1][2], "no forward pass more"


def test_channel_2_makes_no_second_pass_of_the_student(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    settings = ChannelSettings(teacher="live")
    trainer = made(tokenizer, server.url, tmp_path, scripts(TWO_SITES), learning_rate=0.0, settings=settings)
    trainer.train()
    (seen,) = trainer.seen
    sites = sum(map(len, seen["inputs"]["sdpo_items"]))
    # One is GRPO's; the teacher's take several sites each, and are over what one does not share with the one before.
    assert sites == 8 and 2 <= seen["passes"] <= 1 + sites / 2


def test_a_tool_call_that_cannot_be_read_is_an_error_site_too(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    torn = ['<tool_call>{"name": "read", "arguments": {"path": ']
    trainer = made(tokenizer, server.url, tmp_path, scripts(torn, NO_SITE))
    trainer.train()
    keys = [item.hint_template_key for row in trainer.seen[0]["inputs"]["sdpo_items"] for item in row]
    assert keys == ["tool.malformed"] * 2


def test_hints_are_tried_in_forks_and_dropped_where_they_do_not_help(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    answers = iter([call("read", path="red"), call("read", path="gray"), "I do not know", call("read", path="red")])

    class Hinted(Trainer):  # type: ignore[misc]
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self, "_asking", False):
                return [tokenizer.encode(next(answers) + "<|im_end|>") for _ in prompt_ids], None
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)

        def _sample(self, contexts: Any) -> Any:
            self._asking = True
            try:
                return super()._sample(contexts)
            finally:
                self._asking = False

    check = CounterfactualCheck("always")
    trainer = made(tokenizer, server.url, tmp_path, scripts(ONE_SITE), Hinted, check=check)
    trainer.train()
    items = trainer.seen[0]["inputs"]["sdpo_items"]
    assert sum(map(len, items)) == 2
    assert dict(check.counts) == {
        ("fs.missing", "error_gone"): 2, ("fs.missing", "still_fails"): 1, ("fs.missing", "no_call"): 1,
    }  # fmt: skip
    assert trainer.state.log_history[0]["counterfactual/accepted/fs.missing"] == 0.5
    assert [[p.tool for p in e._runner.played] for e in trainer.environments] == [["read", "submit"]] * 4


def test_more_sites_than_allowed_are_counted_and_left_out(
    server: ServerProcess, tokenizer: Any, tmp_path: Path
) -> None:
    settings = ChannelSettings(max_sites=2, gradient_norms=True)
    trainer = made(tokenizer, server.url, tmp_path, scripts(FOUR_SITES), settings=settings)
    trainer.train()
    items = trainer.seen[0]["inputs"]["sdpo_items"]
    assert [len(row) for row in items] == [2] * 4 and all(item.turn < 2 for row in items for item in row)
    log = trainer.state.log_history[0]
    assert log["sdpo/beyond_max_sites"] == 8.0
    assert log["gradient_norm/grpo"] >= 0.0 and log["gradient_norm/sdpo_kl"] > 0.0 and log["loss/sdpo_kl"] > 0.0


@pytest.mark.parametrize(
    "changes",
    [
        {"num_iterations": 2, "max_steps": 2},
        {"steps_per_generation": 2, "max_steps": 2},
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 2},
        {"gradient_checkpointing": True},
        {"mask_truncated_completions": True},
        {"loss_type": "grpo", "scale_rewards": "none"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_it_trains_as_trl_can_be_told_to(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    script = scripts(FOUR_SITES, CUT, TWO_SITES, NO_SITE)
    trainer = made(
        tokenizer, server.url, tmp_path, script, pairs=Pairs(), alpha_sdpo=0.7, beta_replay=0.3, learning_rate=0.0,
        max_completion_length=260, **changes,
    )  # fmt: skip
    trainer.train()
    inputs = [seen["inputs"] for seen in trainer.seen]
    for batch, seen in zip(inputs, trainer.seen, strict=True):
        window = changes.get("gradient_accumulation_steps", 1) / changes.get("steps_per_generation", 1)
        sdpo = slow_sdpo(trainer.model, batch, tokenizer, jsd_beta=0.5, clip=10.0) / float(
            batch["sdpo_tokens"] * window
        )
        dpo = slow_dpo(trainer.model, batch, beta_dpo=0.1) / float(batch["dpo_pair_count"] * window)
        expected = pytest.approx(0.7 * sdpo + 0.3 * dpo, rel=1e-5, abs=1e-5)
        assert float(seen["loss"] - seen["plain"]) == expected
    assert any(any(batch["sdpo_items"]) for batch in inputs)
    if "mask_truncated_completions" in changes:  # the cut row is not attended to, so it has no states to compare
        (batch,) = inputs
        cut = [row for row in range(4) if not batch["completion_mask"][row].any()]
        assert len(cut) == 1 and not batch["sdpo_items"][cut[0]]


def test_evaluation_is_plain_grpos(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    trainer = made(tokenizer, server.url, tmp_path, scripts(TWO_SITES), per_device_eval_batch_size=4)
    trainer.evaluate(trainer.train_dataset)
    assert trainer.seen and all(float(seen["loss"]) == float(seen["plain"]) for seen in trainer.seen)
    assert not any("sdpo_items" in seen["inputs"] for seen in trainer.seen)
    (log,) = trainer.state.log_history
    assert "eval_loss" in log and not any("sdpo" in name or "loss/" in name for name in log)


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_teacher_that_follows_is_a_moving_average_of_the_student(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, peft: bool
) -> None:
    def weights(model: Any, adapter: str | None) -> dict[str, torch.Tensor]:
        if adapter is None:
            return {name: p.detach().clone() for name, p in model.named_parameters()}
        from peft import get_peft_model_state_dict

        return {n: p.clone() for n, p in get_peft_model_state_dict(model, adapter_name=adapter).items()}

    settings = ChannelSettings(teacher="ema", ema_rate=0.25)
    script = scripts(TWO_SITES, NO_SITE)
    trainer = made(
        tokenizer, server.url, tmp_path, script, peft=peft, settings=settings, alpha_sdpo=1.0, learning_rate=1e-2,
        max_steps=2,
    )  # fmt: skip
    trainer.compute_loss = lambda *a, **k: ThreeChannelGRPOTrainer.compute_loss(trainer, *a, **k)
    follower = trainer._distillation.separate_teacher
    student = trainer.accelerator.unwrap_model(trainer.model)
    own, other = ("default", "errata_teacher") if peft else (None, None)
    expected = weights(student, own)
    for name, weight in weights(follower.model, other).items():
        assert torch.equal(weight, expected[name]), "it starts as the student is"

    with torch.no_grad():  # as a checkpoint that is loaded before training begins
        for weight in (p for p in student.parameters() if p.requires_grad):
            weight.mul_(1.01)
    expected = weights(student, own)

    class Average(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            for name, weight in weights(student, own).items():
                expected[name] = 0.75 * expected[name] + 0.25 * weight

    trainer.add_callback(Average())
    trainer.train()
    for name, weight in weights(follower.model, other).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-7)
    assert trainer.state.log_history[1]["sdpo/divergence"] > 0.0
    moved = [not torch.equal(weight, expected[name]) for name, weight in weights(student, own).items()]
    assert any(moved), "and the student goes on ahead"
    if peft:
        assert student.active_adapter == "default"
        assert all(p.requires_grad is ("default" in n) for n, p in student.named_parameters() if "lora_" in n)


@pytest.mark.parametrize("reference", ["when_asked", "initial"])
def test_pairs_are_anchored_to_the_policy_as_it_was(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, reference: Any
) -> None:
    settings = ChannelSettings(dpo_reference=reference)
    trainer = made(
        tokenizer, server.url, tmp_path, scripts(TWO_SITES, NO_SITE), pairs=Pairs(), alpha_sdpo=0.0, beta_replay=1.0,
        settings=settings, learning_rate=1e-2, max_steps=2,
    )  # fmt: skip
    trainer.compute_loss = lambda *a, **k: ThreeChannelGRPOTrainer.compute_loss(trainer, *a, **k)
    trainer.train()
    first, second = [log["dpo/margin"] for log in trainer.state.log_history if "dpo/margin" in log]
    assert first == pytest.approx(0.0, abs=1e-4), "before the first step the policy is its own reference"
    assert (abs(second) > 1e-3) is (reference == "initial")


def test_a_base_that_is_not_there_cannot_teach(server: ServerProcess, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is none"):
        made(tokenizer, server.url, tmp_path, scripts(NO_SITE), settings=ChannelSettings(teacher="base"))


def test_a_multimodal_models_length_is_that_of_its_text_model() -> None:
    from transformers import Gemma3Config, Qwen2_5_VLConfig

    from errata_trainer.channels.forward import longest_row

    for multimodal in (Gemma3Config(), Qwen2_5_VLConfig()):
        assert longest_row(multimodal) == multimodal.get_text_config().max_position_embeddings


def test_a_rollout_that_cannot_be_read_is_counted_and_the_others_train(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from errata_trainer.assembly import batch as module

    build, calls = module.build_rollout, []

    def odd(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return build(*given[:3], given[3][:1] if len(calls) == 1 else given[3], *given[4:], **named)

    monkeypatch.setattr(module, "build_rollout", odd)
    trainer = made(tokenizer, server.url, tmp_path, scripts(TWO_SITES), alpha_sdpo=1.0)
    trainer.train()
    (seen,) = trainer.seen
    assert sum(not items for items in seen["inputs"]["sdpo_items"]) == 1
    assert sum(map(len, seen["inputs"]["sdpo_items"])) > 0
    assert trainer.state.log_history[0]["rollouts/unread"] == 1.0


def test_a_site_whose_hint_cannot_be_spliced_is_counted(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = made(tokenizer, server.url, tmp_path, scripts(TWO_SITES), alpha_sdpo=1.0)
    monkeypatch.setattr(trainer._driver.sites.renderer, "header_ids", (1, 2, 3))
    trainer.train()
    assert trainer.state.log_history[0]["sdpo/not_spliced"] > 0


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_teacher_that_follows_goes_on_from_its_checkpoint(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, peft: bool
) -> None:
    def run(folder: str, resume: str | None = None, **changes: Any) -> Any:
        trainer = made(
            tokenizer, server.url, tmp_path / folder, scripts(TWO_SITES, NO_SITE), peft=peft, alpha_sdpo=1.0,
            learning_rate=1e-2, lr_scheduler_type="constant", save_strategy="steps", save_steps=1, **changes,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        return trainer._distillation.separate_teacher

    def weights(follower: Any) -> Any:
        return follower.shadow_weights if peft else follower.model.state_dict()

    run("first", max_steps=1)
    checkpoint = tmp_path / "first" / "checkpoint-1"
    saved = torch.load(checkpoint / "errata_teacher.pt", weights_only=True)
    follower = made(
        tokenizer, server.url, tmp_path / "again", scripts(TWO_SITES, NO_SITE), peft=peft, alpha_sdpo=1.0
    )._distillation.separate_teacher
    follower.begin(follower.model, torch.device("cpu"), checkpoint)
    for name, weight in weights(follower).items():
        assert torch.equal(weight, saved[name])
    ahead = run("resumed", str(checkpoint), max_steps=2)
    whole = run("whole", max_steps=2)
    for name, weight in weights(ahead).items():
        torch.testing.assert_close(weight, weights(whole)[name], rtol=1e-5, atol=1e-6)


class Drawing(Pairs):
    """Pairs whose draws depend on how many there were."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = 0

    def sample(self, count: int, referred: Callable[[Any], list[DpoPair]]) -> list[DpoPair]:
        self.draws += 1
        self.rollouts = self.rollouts[self.draws % 3 :]
        return super().sample(count, referred)

    def state_dict(self) -> dict[str, Any]:
        return {"draws": self.draws}

    def load_state_dict(self, state: Any) -> None:
        self.draws = state["draws"]


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
def test_a_resumed_run_is_an_uninterrupted_one(
    server: ServerProcess, tokenizer: Any, tmp_path: Path, peft: bool
) -> None:
    """Student and teacher to 1e-6, and with them what the guard, the watch, the check and the pairs remember."""

    def run(folder: str, resume: Path | None = None, **changes: Any) -> Any:
        check = CounterfactualCheck("sample", rate=0.5, seed=3)
        settings = ChannelSettings(lower_dose=True, ema_rate=0.3, max_site_share=0.5)
        trainer = made(
            tokenizer, server.url, tmp_path / folder, scripts(TWO_SITES, NO_SITE, ONE_SITE, BAD_CALL), peft=peft,
            alpha_sdpo=1.0, beta_replay=0.3, pairs=Drawing(), learning_rate=1e-2, lr_scheduler_type="constant",
            save_strategy="steps", save_steps=2, settings=settings, check=check, **changes,
        )  # fmt: skip
        trainer._watch.__init__(1, lower_dose=True)
        trainer._sample = lambda contexts: [[("read", {"path": "red"})] for _ in contexts]
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    whole = run("whole", max_steps=4)
    first = run("first", max_steps=2)
    again = run("again", tmp_path / "first" / "checkpoint-2", max_steps=4)
    assert (tmp_path / "first" / "checkpoint-2" / "errata_state.json").is_file()
    for one, other in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-6)
    moved = [not torch.equal(a, b) for a, b in zip(whole.model.parameters(), first.model.parameters(), strict=True)]
    assert any(moved)
    followers = [trainer._distillation.separate_teacher for trainer in (whole, again)]
    teachers = [f.shadow_weights if peft else f.model.state_dict() for f in followers]
    for name, weight in teachers[0].items():
        torch.testing.assert_close(teachers[1][name], weight, rtol=0.0, atol=1e-6)
    for name, part in whole._channels.state.parts.items():
        state, other = part.state_dict(), again._channels.state.parts[name].state_dict()
        rounded = [json.loads(json.dumps(s), parse_float=lambda text: round(float(text), 4)) for s in (state, other)]
        assert rounded[0] == rounded[1], name
        assert state != first._channels.state.parts[name].state_dict(), f"{name} goes on"
    assert set(whole._channels.state.parts) == {"guard", "watch", "check", "pairs"}
    logs = [
        [log for log in trainer.state.log_history if log.get("step") == 3 and "loss" in log]
        for trainer in (whole, again)
    ]
    for name in ("loss/grpo", "loss/sdpo_kl", "sdpo/tokens", "dpo/pairs", "sdpo/dose"):
        assert logs[0][0][name] == pytest.approx(logs[1][0][name], abs=1e-5), name


def test_a_checkpoint_of_before_has_nothing_to_remember(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = ChannelState({"watch": Watch(), "nothing": None})
    state.restore(tmp_path)
    assert "has no errata_state.json" in caplog.text and list(state.parts) == ["watch"]


def test_dropout_that_would_be_distilled_is_refused_or_switched_off() -> None:
    from errata_trainer.channels.forward import refuse_dropout, switch_off_dropout

    model = tiny_model(tiny_tokenizer(["a"]))
    refuse_dropout(model)
    model.add_module("noise", torch.nn.Dropout(0.05))
    model.eval()
    with pytest.raises(ValueError, match="switch_off_dropout"):
        refuse_dropout(model)
    assert not model.training and not model.noise.training
    assert switch_off_dropout(model) == ["noise"] and model.noise.p == 0.0
    refuse_dropout(model)


@pytest.mark.parametrize(
    ("weight", "step", "expected"),
    [
        (0.05, 0, True),
        (0.0, 0, False),
        (linear(0.05, 0.0, 100), 50, True),
        (linear(0.05, 0.0, 100), 150, False),
        (linear(0.0, 0.05, 100), 0, True),
    ],
)
def test_teachers_are_asked_only_as_long_as_their_pairs_may_have_a_weight(
    weight: Any, step: int, expected: bool
) -> None:
    trainer: Any = SimpleNamespace(state=SimpleNamespace(global_step=step, max_steps=200))
    assert ThreeChannelGRPOTrainer._may_have_weight(trainer, weight) is expected
