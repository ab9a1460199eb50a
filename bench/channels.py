"""What channel 2 costs beside a GRPO pass: memory of the loss, tokens a teacher computes, time of both.

    python bench/channels.py            # prints JSON; medians of 5 alternating rounds
    python bench/channels.py --smoke    # once, small

CPU time of one thread, float32. `loss`: the divergence of N tokens and its gradient, to the hidden states alone, from
logits (`plain`), from hidden states in chunks of 64 tokens (`chunked`), and by TRL's kernel (`trl`); peak memory is
that of a process of its own, once, above what it had before. `teacher`: hidden states of all sites of rollouts with a
common prompt, each row alone and with common beginnings computed once, against GRPO's training pass over the rollouts.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if importlib.util.find_spec("trl") is None:
    print("left out: torch and TRL are missing (make trainer)")
    sys.exit(0)

import torch

from errata_trainer import Rollout, Turn
from errata_trainer.channels.distil import distil
from errata_trainer.channels.forward import frozen_states, trained_states
from errata_trainer.channels.sdpo import Divergence
from errata_trainer.channels.splicing import splice

SMOKE = "--smoke" in sys.argv[1:]
ROUNDS = 1 if SMOKE else 5
HIDDEN, VOCABULARY = (32, 2048) if SMOKE else (256, 16384)
TOKENS = (8, 32) if SMOKE else (64, 512)
CHUNK = 64 * VOCABULARY


def losses(tokens: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return the ways to one number."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(tokens, HIDDEN, generator=generator) for _ in range(2))
    student.requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator) / HIDDEN**0.5

    def trl() -> torch.Tensor:
        from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

        return ChunkedDivergenceFunction.apply(student, weight, None, teacher, weight, None, 0.5)[0].sum()

    return {
        "plain": lambda: Divergence()(student @ weight.T, teacher @ weight.T).sum(),
        "chunked": lambda: distil(student, teacher, weight, chunk_elements=CHUNK)[0],
        "trl": trl,
    }


def memory_kib(field: str) -> int:
    """Return a row of what the kernel says of this process: VmRSS now, VmHWM at most since `clear_refs`."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith(field))


def peak_mib(name: str, tokens: int, results: Any) -> None:
    """Put into the queue how much more memory a loss and its gradient took than there was before."""
    loss = losses(tokens)[name]
    losses(2)[name]().backward()  # what libraries allocate once
    Path("/proc/self/clear_refs").write_text("5")
    before = memory_kib("VmRSS")
    loss().backward()
    results.put((memory_kib("VmHWM") - before) / 1024)


def in_a_process(name: str, tokens: int) -> float:
    """Return what `peak_mib` measured, in a fork: what this process freed and kept would hide it."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    process = context.Process(target=peak_mib, args=(name, tokens, results))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"{name} with {tokens} tokens ended with {process.exitcode}")
    return float(results.get())


def model() -> Any:
    """Return a model whose passes, not its head, are what costs."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 4, "vocab_size": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": HIDDEN // 4}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads))


def rollouts() -> list[Rollout]:
    """Return a group of 4 rollouts with one prompt and 8 turns of different tokens each."""
    prompt, result, action = (40, 20, 5) if SMOKE else (400, 120, 30)
    generator = torch.Generator().manual_seed(1)

    def some(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, 2000, (count,), generator=generator).tolist())

    start, made = some(prompt), []
    for _ in range(4):
        completion: tuple[int, ...] = ()
        turns = []
        for index in range(8):
            turns.append(Turn(index, len(completion), len(completion) + action))
            completion += (*some(action), *some(result), 1)
        made.append(Rollout((*start, 1), completion, (1,) * len(completion), tuple(turns)))
    return made


def teachers() -> dict[str, Callable[[], Any]]:
    """Return the passes that are compared: GRPO's own, and the teacher's with two sites in each rollout."""
    policy, group = model(), rollouts()
    hint = tuple(range(100, 100 + (5 if SMOKE else 40)))
    items = [splice(r, turn, hint, header_ids=(1,)) for r in group for turn in (3, 6)]
    rows, positions = [i.teacher_ids for i in items], [i.teacher_positions for i in items]
    whole = [r.prompt_ids + r.completion_ids for r in group]
    return {
        "grpo": lambda: trained_states(policy, whole, [[len(r) - 1] for r in whole]).sum().backward(),
        "apart": lambda: frozen_states(policy, rows, positions, share=False),
        "shared": lambda: frozen_states(policy, rows, positions),
    }


def seconds(run: Callable[[], Any]) -> float:
    """Return the CPU time of a call: others on the machine change its length."""
    start = time.process_time()
    run()
    return time.process_time() - start


def alternating(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Return seconds of each, round by round."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


def ratios(times: dict[str, list[float]], base: str) -> dict[str, float]:
    """Return medians of the rounds' ratios."""
    return {
        name: round(statistics.median(t / b for t, b in zip(times[name], times[base], strict=True)), 3)
        for name in times
    }


def main() -> None:
    """Print all figures."""
    torch.set_num_threads(1)
    report: dict[str, Any] = {
        "machine": platform.platform(), "torch": torch.__version__, "rounds": ROUNDS,
        "hidden": HIDDEN, "vocabulary": VOCABULARY, "loss": [], "teacher": {},
    }  # fmt: skip
    peaks = {tokens: {name: round(in_a_process(name, tokens)) for name in losses(2)} for tokens in TOKENS}
    for tokens in TOKENS:
        runs = {name: lambda loss=loss: loss().backward() for name, loss in losses(tokens).items()}
        row: dict[str, Any] = {"tokens": tokens, "time_to_plain": ratios(alternating(runs), "plain")}
        row["peak_mib"] = peaks[tokens]
        report["loss"].append(row)
    times = alternating(teachers())
    report["teacher"] = {
        "time_to_grpo": ratios(times, "grpo"),
        "time_to_apart": ratios(times, "apart"),
        "spread_s": {name: [round(min(t), 4), round(max(t), 4)] for name, t in times.items()},
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
