"""Write the memory table of docs/training.md: GPU memory by model, recipe and number of GPUs, computed.

    scripts/memory_table.py [--check]

The sums are of what is known exactly (weights, gradients, Adam's two moments, the teacher's copy, vLLM's share), and of
an upper estimate of activations with gradient checkpointing. Nothing of it was measured on a GPU.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs/training.md"
BEGIN, END = "<!-- memory table: scripts/memory_table.py -->\n", "<!-- end of the memory table -->\n"

GPU_GB, VLLM_SHARE = 80.0, 0.3
ROWS, TOKENS, RANK = 2, 10_240, 32
"""Rows of a micro-batch, tokens of a row, rank of the adapter."""


@dataclass(frozen=True)
class Model:
    """Shape of a model, from its published configuration."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    tied: bool

    @property
    def per_layer(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's linear maps."""
        own, shared = self.heads * self.head, self.kv_heads * self.head
        attention = [(self.hidden, own), (self.hidden, shared), (self.hidden, shared), (own, self.hidden)]
        return [*attention, *[(self.hidden, self.intermediate)] * 3]

    @property
    def parameters(self) -> int:
        """All of them."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * sum(a * b for a, b in self.per_layer)

    @property
    def adapter(self) -> int:
        """Those of LoRA on every linear map."""
        return self.layers * sum(RANK * (a + b) for a, b in self.per_layer)

    @property
    def activations(self) -> float:
        """Bytes: each layer's input, one layer whole, and the logits of a chunk with their gradient."""
        tokens = ROWS * TOKENS
        kept = self.layers * tokens * self.hidden * 2
        one = tokens * (10 * self.hidden + 4 * self.intermediate + 2 * self.heads * self.head) * 2
        return kept + one + 10 * 2**24 * 4


MODELS = (
    Model("Qwen3-0.6B", 28, 1024, 3072, 16, 8, 128, 151_936, True),
    Model("Qwen3-4B", 36, 2560, 9728, 32, 8, 128, 151_936, True),
    Model("Qwen3-8B", 36, 4096, 12_288, 32, 8, 128, 151_936, False),
)


def parts(model: Model, recipe: str, gpus: int) -> list[float]:
    """Return gigabytes of weights, of gradients and Adam, of the ema teacher, of activations, and of vLLM."""
    if recipe == "LoRA":  # the base in bf16; the adapter and the teacher's copy of it in fp32
        weights, optimizer, teacher = (
            2.0 * model.parameters + 4.0 * model.adapter,
            12.0 * model.adapter,
            4.0 * model.adapter,
        )
    else:  # all in fp32, as TRL loads a model; ZeRO-2 divides gradients and moments
        divided = gpus if recipe == "full, ZeRO-2" else 1
        weights, optimizer, teacher = 4.0 * model.parameters, 12.0 * model.parameters / divided, 4.0 * model.parameters
    return [one / 1e9 for one in (weights, optimizer, teacher, model.activations)] + [VLLM_SHARE * GPU_GB]


def table() -> str:
    """Return the table in Markdown."""
    lines = [
        "| model | recipe | GPUs | weights | gradients, Adam | `ema` teacher | activations | vLLM | GB of 80 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for recipe, counts in (("LoRA", "1, 8"), ("full, DDP", "1, 8"), ("full, ZeRO-2", "8")):
            found = parts(model, recipe, 8)
            total = sum(found)
            fits = f"{total:.0f}" if total < 0.95 * GPU_GB else f"**{total:.0f}: does not fit**"
            lines.append(
                f"| {model.name} | {recipe} | {counts} | {' | '.join(f'{one:.1f}' for one in found)} | {fits} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail where the page differs")
    check = parser.parse_args().check
    page = PAGE.read_text("utf-8")
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    made = f"{head}{BEGIN}{table()}{END}{tail}"
    if check:
        return int(made != page)
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
