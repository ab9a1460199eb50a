"""GRPO with three channels on the terminal environment or on SWE-bench Lite, by TRL.

Serve the environment in another shell, then train, on GPUs or with a tiny policy, made on the spot, on a CPU:

    errata serve terminal
    python examples/grpo_terminal.py --model Qwen/Qwen3-4B --lora 32 --vllm
    python examples/grpo_terminal.py --model Qwen/Qwen3-4B --lora 32 --vllm --teachers MODEL MODEL MODEL
    python examples/grpo_terminal.py --model Qwen/Qwen3-4B --lora 32 --vllm --env swe_bench_lite --split dev
    accelerate launch --config_file examples/accelerate/8_gpus.yaml examples/grpo_terminal.py --lora 32 --vllm
    python examples/grpo_terminal.py --tiny

docs/training.md has a table of which model fits where, with an adapter and without.

Against a script that trains with `GRPOTrainer` there are two changes: the trainer's class, and `environment_factory`.
Teachers are asked through OpenRouter, with the key in OPENROUTER_API_KEY; nobody is asked without `--teachers`.
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
from errata_trainer.counterfactual import CounterfactualCheck
from errata_trainer.recipes.trl import TeacherPairs, ThreeChannelGRPOTrainer, dataset, environment_factory
from errata_trainer.teachers import AnswerCache, Budget, Prompter, TeacherPool
from errata_trainer.tools import published


def main(arguments: Sequence[str] | None = None) -> ThreeChannelGRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--env", default="terminal", help="terminal (default) or swe_bench_lite, as served at the URL")
    parser.add_argument("--split", help="which tasks of the server, where it has several splits")
    parser.add_argument("--model", default="Qwen/Qwen3-4B")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train an adapter of this rank; else all weights")
    parser.add_argument("--tiny", action="store_true", help="a tiny policy on one task, on a CPU")
    parser.add_argument("--vllm", action="store_true", help="generate with vLLM in this process")
    parser.add_argument("--teachers", nargs="+", default=[], metavar="MODEL", help="at least two, of OpenRouter")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="what teachers may cost in all")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--output", type=Path, default=Path("grpo-terminal"))
    options = parser.parse_args(arguments)
    if options.tiny:
        return tiny(options)
    if torch.cuda.device_count() > 1 and "WORLD_SIZE" not in os.environ:
        parser.error("several GPUs: start this with accelerate launch, or set CUDA_VISIBLE_DEVICES=0")

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
        ddp_timeout=7200,  # longer than a lost server takes to cost an episode: the other ranks wait meanwhile
        use_vllm=options.vllm,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        logging_steps=1,
        save_steps=20,
    )
    rows = dataset(options.url, options.env, split=options.split)
    with ExitStack() as held:
        trainer = ThreeChannelGRPOTrainer(  # GRPOTrainer
            model=options.model,
            args=config,
            train_dataset=rows,
            environment_factory=environment_factory(options.url, options.env),  # tools, reset and reward
            peft_config=adapter(options.lora),
            check=CounterfactualCheck("sample", rate=0.1),  # off without
            pairs=teachers(options, held) if options.teachers else None,  # no channel 3 without
        )
        trainer.train()
    return trainer


def adapter(rank: int | None) -> Any:
    """Return the configuration of an adapter on all linear maps; None for a rank of None."""
    if rank is None:
        return None
    from peft import LoraConfig

    # Channel 2 refuses dropout: it would distil its noise.
    return LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules="all-linear")


def teachers(options: argparse.Namespace, held: ExitStack) -> TeacherPairs:
    """Return the source of channel 3's pairs."""
    from errata_trainer.teachers.endpoint import ChatTeacher, Endpoint

    environment = published(options.env)
    tools = [
        {"name": t.name, "description": t.description, "parameters": t.parameters} for t in environment.tools.values()
    ]
    pool = TeacherPool(
        [ChatTeacher(Endpoint(model)) for model in options.teachers],
        Prompter(tuple(tools), environment.agent_text),
        budget=Budget(tokens=options.tokens),  # or usd=, with prices in each Endpoint
        cache=AnswerCache(options.output / "answers"),
        episodes=Episodes(options.url),
    )
    held.enter_context(pool)
    return TeacherPairs(pool, options.output / "pairs.jsonl")


def tiny(options: argparse.Namespace) -> ThreeChannelGRPOTrainer:
    """Train the policy of `errata demo training`, which knows one task's commands, right and wrong ones."""
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
