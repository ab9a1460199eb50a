"""Trains with GRPO and the three channels on the terminal environment or SWE-bench Lite, with TRL.

Serve the environment in another shell, then train: on GPUs, or with `--tiny` a tiny policy on a CPU.

    errata serve terminal
    python examples/grpo_terminal.py --model Qwen/Qwen3-4B --lora 32 --vllm
    python examples/grpo_terminal.py --model Qwen/Qwen3-4B --lora 32 --vllm --teachers MODEL MODEL MODEL
    python examples/grpo_terminal.py --model Qwen/Qwen3-4B --lora 32 --vllm --env swe_bench_lite --split dev
    accelerate launch --config_file examples/accelerate/8_gpus.yaml examples/grpo_terminal.py --lora 32 --vllm
    python examples/grpo_terminal.py --tiny

docs/training.md has a table of the models that fit on a GPU, with an adapter and without.

Compared to a script with TRL's `GRPOTrainer` there are two changes: the trainer's class, and `environment_factory`.
With `--teachers`, models of OpenRouter are the teachers of channel 3; the key is OPENROUTER_API_KEY.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig

from errata_client import Episodes
from errata_trainer.assembly.counterfactual import CounterfactualCheck
from errata_trainer.episodes.tools import published
from errata_trainer.presets import PRESETS, preset
from errata_trainer.recipes.trl import TeacherPairs, ThreeChannelGRPOTrainer, dataset, environment_factory
from errata_trainer.teachers import AnswerCache, Budget, Prompter, TeacherPool


def main(arguments: Sequence[str] | None = None) -> ThreeChannelGRPOTrainer:
    """Train as the command line says; return the trainer."""
    options = parse(arguments)
    return tiny(options) if options.tiny else train(options)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--env", default="terminal", help="terminal (default) or swe_bench_lite, as served at the URL")
    parser.add_argument("--split", help="the split of tasks, where the server has several")
    parser.add_argument("--model", default="Qwen/Qwen3-4B")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank; else all weights")
    parser.add_argument(
        "--preset", choices=sorted(PRESETS), help="settings that an experiment chose (docs/training.md)"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny policy on one task, on a CPU")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in this process")
    parser.add_argument("--teachers", nargs="+", default=[], metavar="MODEL", help="models of OpenRouter, at least two")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="budget of all teachers together")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("grpo-terminal"))
    options = parser.parse_args(arguments)
    if not options.tiny and torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        parser.error("several GPUs: start this with accelerate launch, or set CUDA_VISIBLE_DEVICES=0")
    return options


def train(options: argparse.Namespace) -> ThreeChannelGRPOTrainer:
    """Train a model by name."""
    config = GRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=16,
        num_generations=8,
        max_completion_length=8192,
        max_tool_calling_iterations=24,
        learning_rate=1e-6 if options.lora is None else 1e-5,
        model_init_kwargs=None if options.lora is None else {"dtype": "bfloat16"},
        ddp_timeout=7200,  # seconds; other ranks wait this long while one rank waits for an unreachable server
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        logging_steps=1,
        save_steps=20,
    )
    rows = dataset(options.url, options.env, split=options.split)
    with ExitStack() as resources:
        trainer = ThreeChannelGRPOTrainer(  # instead of GRPOTrainer
            model=options.model,
            args=config,
            train_dataset=rows,
            environment_factory=environment_factory(options.url, options.env),  # tools, reset and reward
            peft_config=adapter(options.lora),
            check=CounterfactualCheck("sample", rate=0.1),  # None switches the check off
            pairs=teachers(options, resources) if options.teachers else None,  # None switches channel 3 off
            **(preset(options.preset) if options.preset else {}),
        )
        trainer.train()
    return trainer


def adapter(rank: int | None) -> Any:
    """Return the configuration of a LoRA adapter on all linear layers; None where ``rank`` is None."""
    if rank is None:
        return None
    from peft import LoraConfig

    # Channel 2 refuses dropout, whose noise it would distil.
    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")


def teachers(options: argparse.Namespace, resources: ExitStack) -> TeacherPairs:
    """Return the source of channel 3's pairs; ``resources`` closes its connections."""
    from errata_trainer.teachers.endpoint import ChatTeacher, Endpoint

    environment = published(options.env)
    tools = [
        {"name": t.name, "description": t.description, "parameters": t.parameters} for t in environment.tools.values()
    ]
    pool = TeacherPool(
        [ChatTeacher(Endpoint(model)) for model in options.teachers],
        Prompter(tuple(tools), environment.agent_text, environment.agent_text_version),
        budget=Budget(tokens=options.tokens),  # or Budget(usd=...), with prices in each Endpoint
        cache=AnswerCache(options.output / "answers"),
        episodes=Episodes(options.url),
    )
    resources.enter_context(pool)
    return TeacherPairs(pool, options.output / "pairs.jsonl")


def tiny(options: argparse.Namespace) -> ThreeChannelGRPOTrainer:
    """Train the tiny policy of `errata demo training` on one task, whose right and wrong commands it knows."""
    from errata_trainer.demo import script, warm_up

    tokenizer, model = warm_up.taught_policy(options.url, say=print)
    config = GRPOConfig(
        output_dir=str(options.output),
        max_steps=options.steps,
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=480,
        max_tool_calling_iterations=6,
        learning_rate=5e-4,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    trainer = ThreeChannelGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=config,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": script.PROMPT}], "task_id": script.TASK}]
        ),
        environment_factory=environment_factory(options.url, "terminal", tools=script.TOOLS),
    )
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
