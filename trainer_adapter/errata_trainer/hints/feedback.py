"""Hints from the other attempts of a group and from the environment's output, as in the SDPO paper.

Options and defaults are those of the paper's code (lasgroup/SDPO); the wording of the hints is ours. In the paper the
text replaces the last user message and the whole answer is distilled. Here it is a message directly before one turn,
and only that turn is distilled.

A demonstration contains a solution, unlike the hints of templates. That is why it works, and why it is an option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from errata_protocol.environment import default_agent_text

from ..rollouts.rollout import Rollout
from ..rollouts.transcript import without_thinking
from .hint import Attempt, FailedTurn, Hint, Hinter, Source
from .neutral import Count, approximate_tokens, neutral
from .pack import key_of

VERSION = "1"

DEMONSTRATION = "Another attempt at this task succeeded. This is what it did:\n\n{demonstration}"
FEEDBACK = "An earlier attempt to go on from here was answered by the environment:\n\n{feedback}"
CLOSING = "Take your next action with this in mind."

_CUT = "\n[…]"
_MAX_CHARS = 200_000
_LEAST = 40  # less of it says nothing


@dataclass(slots=True)
class FeedbackHinter:
    """Writes hints from successful attempts of the same group and from the environment's output.

    Args:
        attempts: All attempts of the batch; the first that fits is the demonstration. A recipe sets them by
            `begin_batch`.
        demonstration: Show what a successful attempt of the group did.
        success_threshold: Reward from which an attempt is a success.
        dont_reprompt_on_self_success: An attempt is never its own demonstration. (One that succeeded and has a
            successful sibling still gets it, as in the paper's code.)
        skip_successful: An attempt that succeeded gets no hint at all.
        remove_thinking: Leave ``<think>`` out of demonstrations.
        environment_feedback: Show what the environment answered to the turn.
        feedback_only_without_solution: Show the environment's answer only where there is no demonstration.
        max_tokens: Most tokens of a hint. A demonstration keeps its beginning, feedback its end.
        count: Returns the number of tokens of a text.
        agent_text: Returns the text that the agent reads of an observation (PROTOCOL B4).
        fallback: Writes the hint where this hinter has nothing to say; None leaves the turn without a hint.

    Attributes:
        counts: Number of turns by outcome: ``demonstration``, ``feedback`` or ``both``, by what the hint shows;
            ``none``, left to the fallback; ``skipped``.
    """

    attempts: Sequence[Attempt] = ()
    demonstration: bool = True
    success_threshold: float = 1.0
    dont_reprompt_on_self_success: bool = True
    skip_successful: bool = False
    remove_thinking: bool = True
    environment_feedback: bool = True
    feedback_only_without_solution: bool = True
    max_tokens: int = 2048
    count: Count = approximate_tokens
    agent_text: Callable[[Mapping[str, Any]], str] = default_agent_text
    fallback: Hinter | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def begin_batch(self, attempts: Sequence[Attempt]) -> None:
        """Replace the attempts with those of the next batch."""
        self.attempts = attempts

    def hint(self, failed: FailedTurn) -> Hint | None:
        """Return a hint for a turn. With a demonstration the turn need not have failed."""
        own = self._own(failed.rollout)
        if self.skip_successful and self._succeeded(failed.rollout):
            self.counts["skipped"] += 1
            return None
        shown = self._demonstration(own) if self.demonstration and own is not None else ""
        answer = ""
        if self.environment_feedback and not (shown and self.feedback_only_without_solution):
            answer = neutral(self.agent_text(failed.observation), _MAX_CHARS, lines=True) if failed.observation else ""
        text = self._fitted(shown, answer)
        if text is None:
            self.counts["none"] += 1
            return None if self.fallback is None else self.fallback.hint(failed)
        what = "both" if shown and answer else "demonstration" if shown else "feedback"
        self.counts[what] += 1
        source: Source = "demonstration" if shown else "feedback"
        return Hint(text, key_of(failed) or source, f"{source}/{VERSION}", source)

    def _own(self, rollout: Rollout) -> Attempt | None:
        return next((one for one in self.attempts if one.rollout is rollout), None) or next(
            (one for one in self.attempts if one.rollout == rollout), None
        )

    def _succeeded(self, rollout: Rollout) -> bool:
        return rollout.lost is None and rollout.reward is not None and rollout.reward >= self.success_threshold

    def _demonstration(self, own: Attempt) -> str:
        for other in self.attempts:
            if other.group != own.group or not self._succeeded(other.rollout):
                continue
            if self.dont_reprompt_on_self_success and other is own:
                continue
            texts = [without_thinking(text) if self.remove_thinking else text for text in other.texts]
            shown = [neutral(text, _MAX_CHARS, lines=True) for text in texts]
            return "\n\n".join(text for text in shown if text)
        return ""

    def _fitted(self, demonstration: str, answer: str) -> str | None:
        """Return the hint with both parts cut to the budget; None if too little is left."""
        if not demonstration and not answer:
            return None

        def written(demo_chars: int, answer_chars: int) -> str:
            demo = demonstration[:demo_chars] + (_CUT if demo_chars < len(demonstration) else "")
            tail = (_CUT.strip() + "\n" if answer_chars < len(answer) else "") + answer[len(answer) - answer_chars :]
            parts = [DEMONSTRATION.format(demonstration=demo)] if demonstration else []
            parts += [FEEDBACK.format(feedback=tail)] if answer else []
            return "\n\n".join([*parts, CLOSING])

        if self.count(written(len(demonstration), len(answer))) <= self.max_tokens:
            return written(len(demonstration), len(answer))
        low, high = 0, len(demonstration) + len(answer)  # code points kept of both; counting grows with them
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(written(*_shares(middle, demonstration, answer))) <= self.max_tokens:
                low = middle
            else:
                high = middle - 1
        return written(*_shares(low, demonstration, answer)) if low >= _LEAST else None


def _shares(kept: int, demonstration: str, answer: str) -> tuple[int, int]:
    whole = len(demonstration) + len(answer)
    of_demonstration = kept * len(demonstration) // whole
    return of_demonstration, min(kept - of_demonstration, len(answer))
