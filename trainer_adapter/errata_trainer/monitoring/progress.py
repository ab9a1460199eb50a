"""The progress line of a logged step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .metrics import OUTCOMES


def progress_line(step: int, logs: Mapping[str, Any], most: int | None = None, eid: str | None = None) -> str:
    """Return the progress line of a step: reward, calls, errors, the loss of each channel with its sites or pairs, the
    teachers' cost, and an episode to look at.

    Args:
        step: Optimizer steps so far.
        logs: Logged metrics of the step; parts of the line whose metric is missing are left out.
        most: Total number of optimizer steps; None if unknown.
        eid: Key of an episode of the step's batch; None for none.
    """
    parts = [f"step {step}" + (f"/{most}" if most else "")]
    parts += _number(logs, "reward", "reward {:.3f}")
    parts += _number(logs, "rollouts/errors", "errors {:.2f} a rollout")
    parts += health(logs)
    if float(logs.get("episodes/lost") or 0.0):
        parts += _number(logs, "episodes/lost", "{:.0%} of the episodes lost")
    parts += _number(logs, "loss/grpo", "grpo {:.4f}")
    parts += _number(logs, "loss/sdpo_kl", "sdpo {:.4f}")
    pairs = logs.get("dpo/pairs")
    parts += _number(logs, "loss/trace_replay_dpo", "dpo {:.4f}", f"{pairs:.0f} pairs" if pairs else "")
    parts += _number(logs, "counterfactual/accepted", "hints helped {:.0%}")
    if float(logs.get("dpo/pool/teachers/usd") or 0.0):
        parts += _number(logs, "dpo/pool/teachers/usd", "teachers {:.2f} USD")
    elif float(logs.get("dpo/pool/teachers/tokens") or 0.0):
        parts += _number(logs, "dpo/pool/teachers/tokens", "teachers {:,.0f} tokens")
    parts += _number(logs, "step_time", "{:.1f} s")
    if eid is not None:
        parts.append(f"errata replay {eid}")
    return ", ".join(parts)


def health(logs: Mapping[str, Any]) -> list[str]:
    """Return the three numbers that docs/training.md says to look at, as far as they were logged: groups whose rewards
    are all the same, calls, and failing turns that are distilled."""
    parts = _number(logs, "frac_reward_zero_std", "same reward in {:.0%} of groups")
    parts += _number(logs, "rollouts/calls", "calls {:.2f} a rollout")
    if "sdpo/kept" in logs:
        parts.append(f"{float(logs['sdpo/kept'] or 0.0):.0f} of {_failing(logs):.0f} failing turns distilled")
    return parts


FAILING = tuple(outcome for outcome in OUTCOMES if outcome != "not_sampled")
"""What becomes of failing turns, each counted once."""


def _failing(logs: Mapping[str, Any]) -> float:
    return sum(float(logs.get(f"sdpo/{name}") or 0.0) for name in FAILING)


def _number(logs: Mapping[str, Any], name: str, text: str, more: str = "") -> list[str]:
    value = logs.get(name)
    if value is None:
        return []
    return [text.format(float(value)) + (f" ({more})" if more else "")]
