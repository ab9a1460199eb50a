"""What `examples/` shows runs as it stands."""

from __future__ import annotations

import ast
import dataclasses
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest
from scripted import call
from trl import GRPOConfig, GRPOTrainer

import terminal_env
from errata_protocol.rollouts import ErrorMarker
from errata_server.process import ServerProcess
from errata_trainer import Delivery, DpoPair, Rollout, build_rollout, write_records
from errata_trainer.assembly import sites
from errata_trainer.recipes.trl import ChannelSettings, ThreeChannelGRPOTrainer, environment_factory
from errata_trainer.tiny import END, tiny_model, tiny_tokenizer

EXAMPLES = Path(__file__).parents[2] / "examples"
README = (EXAMPLES.parent / "README.md").read_text()
TRAINING = (EXAMPLES.parent / "docs" / "training.md").read_text()
TASKS = Path(terminal_env.__file__).parent / "tasks"


def main_of(name: str) -> Callable[..., Any]:
    main: Callable[..., Any] = runpy.run_path(str(EXAMPLES / name))["main"]
    return main


def rollout_of(tokenizer: Any, path: str, reward: float) -> Rollout:
    """An episode of two turns, of which the first fails unless the path is red."""
    arguments = {"path": path}
    said = [call("read", **arguments), "done"]
    result = {"role": "tool", "name": "read", "content": f"no file {path}" if path != "red" else "the word is owl"}
    prompt = tokenizer.encode("<|im_start|>user\nFind it.<|im_end|>\n<|im_start|>assistant\n")
    first, last = (tokenizer.encode(text + END) for text in said)
    between = tokenizer.encode(f"\n<|im_start|>tool\n{result['content']}<|im_end|>\n<|im_start|>assistant\n")
    marker = None
    if path != "red":
        marker = ErrorMarker(error_kind="path_not_found", hint_template_key="fs.missing", severity="error")
    calls = [{"type": "function", "function": {"name": "read", "arguments": arguments}}]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        result,
        {"role": "assistant", "content": "done"},
    ]
    return build_rollout(
        prompt,
        [*first, *between, *last],
        [1] * len(first) + [0] * len(between) + [1] * len(last),
        messages,
        [Delivery(1, "read", arguments, result["content"], marker)],
        reward=reward,
    )


def test_a_trainer_of_ones_own_lowers_every_loss_on_the_records_it_is_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(["Find it. no file green the word is owl done", call("read", path="red")])
    tokenizer.save_pretrained(tmp_path / "model")
    tiny_model(tokenizer).save_pretrained(tmp_path / "model")
    good, bad = (rollout_of(tokenizer, path, reward) for path, reward in (("red", 1.0), ("green", 0.0)))
    assert good.turns[0].failed is None and bad.turns[0].failed is not None
    chosen, rejected = (one.completion_ids[: one.turns[0].stop] for one in (good, bad))
    pair = DpoPair(good.prompt_ids, chosen, rejected)
    write_records(tmp_path / "records.jsonl", [good, bad, pair])
    main = main_of("own_trainer.py")
    main(tmp_path / "model", tmp_path / "records.jsonl", steps=6)
    told = [
        ast.literal_eval(line.split(" ", 1)[1]) for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()
    ]
    assert len(told) == 6 and set(told[0]) == {"loss/grpo", "loss/sdpo_kl", "loss/trace_replay_dpo"}
    assert told[0]["loss/trace_replay_dpo"] == pytest.approx(0.69315), "the policy is its own reference at first"
    assert told[0]["loss/sdpo_kl"] > 0.0
    assert told[-1]["loss/trace_replay_dpo"] < 0.69 and told[-1]["loss/grpo"] < told[0]["loss/grpo"]

    write_records(tmp_path / "halved.jsonl", [good, bad, replace(pair, weight=0.5)])
    splice = sites.splice
    monkeypatch.setattr(sites, "splice", lambda *one, **more: splice(*one, **more, weight=0.5))
    main(tmp_path / "model", tmp_path / "halved.jsonl", steps=1)
    halved = ast.literal_eval(capsys.readouterr().out.split(" ", 1)[1])
    for part in ("loss/sdpo_kl", "loss/trace_replay_dpo"):
        assert halved[part] == pytest.approx(told[0][part] / 2, abs=2e-5)

    write_records(tmp_path / "good.jsonl", [good, pair])
    with pytest.raises(SystemExit, match=r"good\.jsonl: 0 error sites in 1 rollouts, 1 pairs: both are needed"):
        main(tmp_path / "model", tmp_path / "good.jsonl")


def test_a_trainer_of_ones_own_says_how_it_is_called(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given, status in ((["--help"], None), (["model"], "MODEL FILE.jsonl")):
        monkeypatch.setattr(sys, "argv", ["own_trainer.py", *given])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(EXAMPLES / "own_trainer.py"), run_name="__main__")
        assert left.value.code is None if status is None else status in str(left.value.code)
    assert "MODEL FILE.jsonl" in capsys.readouterr().out


def test_a_trainer_of_ones_own_reads_a_head_with_all_that_a_model_has() -> None:
    """A tiny model has neither bias nor soft cap, so that no loss would tell."""
    calls = [
        node for node in ast.walk(ast.parse((EXAMPLES / "own_trainer.py").read_text())) if isinstance(node, ast.Call)
    ]
    reading = [
        ast.unparse(one) for one in calls if ast.unparse(one.func) in ("distil.distil", "distil.action_logprobs")
    ]
    assert len(reading) == 2
    assert all("head.weight, head.bias, transform=head.transform" in one for one in reading)


@pytest.mark.sandbox
def test_the_trl_script_trains_the_tiny_policy_on_the_terminal(tmp_path: Path) -> None:
    with ServerProcess("terminal", tmp_path / "data") as server:
        trainer = main_of("grpo_terminal.py")(
            ["--tiny", "--url", server.url, "--steps", "1", "--output", str(tmp_path / "out")]
        )
    log = trainer.state.log_history[0]
    assert log["episodes/lost"] == 0.0 and log["reward"] > 0.0
    assert log["sdpo/sites"] > 0.0 and log["loss/sdpo_kl"] > 0.0
    assert "loss/trace_replay_dpo" not in log, "no teachers were named"
    prefixes = ("loss/", "sdpo/", "dpo/", "counterfactual/", "episodes/", "rollouts/")
    by_key = re.compile(r"(sdpo/divergence/|sdpo/share/|counterfactual/accepted/)\S+")
    ours = {by_key.sub(r"\1KEY", name) for name in log if name.startswith(prefixes)}
    assert len(ours) > 6 and [name for name in ours if f"`{name}`" not in TRAINING] == []


@pytest.mark.sandbox
def test_the_readmes_trainer_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny policy for the model from the Hub, and settings of a CPU."""
    from errata_trainer.demo import warm_up

    (text,) = [part.split("```")[0] for part in README.split("```python\n") if "ThreeChannelGRPOTrainer(" in part]
    monkeypatch.chdir(tmp_path)
    on_cpu = {"use_cpu": True, "bf16": False, "max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 4}
    short = {"max_completion_length": 480, "max_tool_calling_iterations": 4, "report_to": [], "save_strategy": "no"}
    with ServerProcess("terminal", tmp_path / "data") as server:
        tokenizer, model = warm_up.taught_policy(server.url, say=lambda *_: None)
        monkeypatch.setattr("trl.GRPOConfig", lambda out, **_: GRPOConfig(out, **on_cpu, **short))
        trainers: list[Any] = []
        monkeypatch.setattr(
            "errata_trainer.recipes.trl.ThreeChannelGRPOTrainer",
            lambda **given: (
                trainers.append(ThreeChannelGRPOTrainer(**given | {"model": model, "processing_class": tokenizer}))
                or trainers[0]
            ),
        )
        exec(compile(text.replace("http://127.0.0.1:8000", server.url), "README.md", "exec"), {})
    assert trainers[0].state.global_step == 1 and "reward" in trainers[0].state.log_history[0]


def test_several_gpus_want_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit):
        main_of("grpo_terminal.py")([])
    assert "accelerate launch" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["8_gpus.yaml", "8_gpus_zero2.yaml"])
def test_accelerate_reads_its_configurations(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(EXAMPLES / "accelerate" / name))
    assert config.num_processes == 8 and config.mixed_precision == "bf16"
    assert f"examples/accelerate/{name}" in TRAINING
    command = (EXAMPLES / "accelerate" / name).read_text().splitlines()[0]
    assert f"--config_file examples/accelerate/{name} examples/grpo_terminal.py" in command


def test_the_memory_table_is_what_its_script_writes() -> None:
    script = EXAMPLES.parent / "scripts/memory_table.py"
    assert subprocess.run([sys.executable, str(script), "--check"], check=False).returncode == 0, f"run {script}"


def test_the_page_on_training_tells_of_every_keyword() -> None:
    keywords = [field.name for field in fields(ChannelSettings)]
    keywords += list(signature(environment_factory).parameters)
    keywords += [
        name
        for name, parameter in signature(ThreeChannelGRPOTrainer.__init__).parameters.items()
        if parameter.kind is Parameter.KEYWORD_ONLY
    ]
    assert len(keywords) > 20
    assert not [name for name in keywords if f"\n| `{name}` |" not in TRAINING]


def test_the_code_on_the_page_on_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "nobody is asked")
    monkeypatch.chdir(tmp_path)
    first, played, terminal, chosen, rows, teachers, check = (
        block.split("```")[0] for block in TRAINING.split("```python\n")[1:]
    )
    for others in (played, terminal, rows):  # test_trl_scaffold.py, the README's and test_trl_swe.py run such lines
        compile(others, "docs/training.md", "exec")
    made: dict[str, Any] = {}
    exec(compile(teachers, "docs/training.md", "exec"), made)
    made["pool"].close()
    exec(compile(check, "docs/training.md", "exec"), {})
    compile(first, "docs/training.md", "exec")  # it needs a model from the Hub; examples/ run the same lines
    (call,) = [
        node for node in ast.walk(ast.parse(first)) if getattr(node, "keywords", None) and len(node.keywords) == 4
    ]
    known = signature(GRPOTrainer.__init__).parameters.keys()
    assert {keyword.arg for keyword in call.keywords} <= known
    given: dict[str, Any] = {}
    names = {"dataclasses": dataclasses, "ThreeChannelGRPOTrainer": lambda *_, **set_: given.update(set_)}
    exec(compile(chosen, "docs/training.md", "exec"), names)
    assert given["settings"].max_sites == 2 and given["settings"].hint_keys == ("!tool.malformed",)
    assert given.keys() <= signature(ThreeChannelGRPOTrainer.__init__).parameters.keys()


def test_the_trl_script_for_a_gpu_asks_trl_for_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", "nobody is asked")
    main, given = main_of("grpo_terminal.py"), {}

    class Trainer:
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

        def train(self) -> None:
            from errata_trainer.tiny import tiny_tokenizer

            given["pairs"].use(tiny_tokenizer(["a"]), [0], "the base of it")
            given["pairs"].close()

    known = {field.name for field in fields(GRPOConfig)}
    monkeypatch.setitem(main.__globals__, "GRPOConfig", dict)  # the real one refuses bfloat16 on a CPU
    monkeypatch.setitem(main.__globals__, "ThreeChannelGRPOTrainer", Trainer)
    with ServerProcess("terminal", tmp_path / "data") as server:
        options = ["--lora", "8", "--vllm", "--teachers", "one", "two", "--preset", "followed-hints"]
        main([*options, "--output", str(tmp_path), "--url", server.url])
    assert given["alpha_sdpo"] == 1.0 and given["settings"].hint_keys == ("!tool.malformed",)
    assert given["args"].keys() <= known and given["args"]["use_vllm"] is True
    assert given["args"]["per_device_train_batch_size"] * given["args"]["gradient_accumulation_steps"] == 32
    assert 32 % given["args"]["num_generations"] == 0
    assert {row["task_id"] for row in given["train_dataset"]} == {
        path.name for path in TASKS.iterdir() if path.is_dir()
    }
    assert given["peft_config"].r == 8 and given["peft_config"].lora_dropout == 0.0, "channel 2 refuses dropout"
    assert given["check"].mode == "sample" and given["pairs"].pool.budget.tokens == 2_000_000
