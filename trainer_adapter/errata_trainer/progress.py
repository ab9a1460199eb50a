"""The progress line of a logged step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sites import OUTCOMES


def progress_line(step: int, logs: Mapping[str, Any], most: int | None = None) -> str:
    """Return the progress line of a step: reward, errors, the loss of each channel with its sites or pairs, and the
    teachers' cost.

    Args:
        step: Optimizer steps so far.
        logs: What was logged; parts that are not there are left out.
        most: Steps in all; None if unknown.
    """
    parts = [f"step {step}" + (f"/{most}" if most else "")]
    parts += _number(logs, "reward", "reward {:.3f}")
    parts += _number(logs, "rollouts/errors", "errors {:.2f} a rollout")
    if float(logs.get("episodes/lost") or 0.0):
        parts += _number(logs, "episodes/lost", "{:.0%} of the episodes lost")
    parts += _number(logs, "loss/grpo", "grpo {:.4f}")
    kept, failed = logs.get("sdpo/kept"), _failing(logs)
    parts += _number(logs, "loss/sdpo_kl", "sdpo {:.4f}", f"{kept:.0f} of {failed:.0f} sites" if kept else "")
    pairs = logs.get("dpo/pairs")
    parts += _number(logs, "loss/trace_replay_dpo", "dpo {:.4f}", f"{pairs:.0f} pairs" if pairs else "")
    parts += _number(logs, "counterfactual/accepted", "hints helped {:.0%}")
    if float(logs.get("dpo/pool/teachers/usd") or 0.0):
        parts += _number(logs, "dpo/pool/teachers/usd", "teachers {:.2f} USD")
    elif float(logs.get("dpo/pool/teachers/tokens") or 0.0):
        parts += _number(logs, "dpo/pool/teachers/tokens", "teachers {:,.0f} tokens")
    parts += _number(logs, "step_time", "{:.1f} s")
    return ", ".join(parts)


FAILING = tuple(outcome for outcome in OUTCOMES if outcome != "not_sampled")
"""What becomes of failing turns, each counted once."""


def _failing(logs: Mapping[str, Any]) -> float:
    return sum(float(logs.get(f"sdpo/{name}") or 0.0) for name in FAILING)


def _number(logs: Mapping[str, Any], name: str, text: str, more: str = "") -> list[str]:
    value = logs.get(name)
    if value is None:
        return []
    return [text.format(float(value)) + (f" ({more})" if more else "")]
