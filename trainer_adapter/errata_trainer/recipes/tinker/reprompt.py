"""The teacher's prompt of interactive SDPO: the conversation with one more message that says what was wrong.

Templates and options are those of the SDPO paper's code and of continualcode, as data: three slots, for the prompt, a
solution and feedback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...channels.splicing import common_prefix
from ...rollouts.transcript import text_of, without_thinking

Render = Callable[[Sequence[Mapping[str, Any]]], Sequence[int]]
"""Function that returns a conversation's tokens with what opens the student's turn: of a tokenizer
``apply_chat_template(..., add_generation_prompt=True)``, of a cookbook's renderer ``build_generation_prompt``."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt of a group at a task, which may be shown to the others.

    Attributes:
        text: Text of the attempt.
        reward: Reward of it; None if it has none.
    """

    text: str
    reward: float | None


@dataclass(frozen=True, slots=True)
class Reprompt:
    """How the teacher is asked again.

    Args:
        template: Text of the added message, with ``{prompt}``, ``{solution}`` and ``{feedback}``.
        solution_template: Text of the slot ``{solution}``, with ``{successful_previous_attempt}``.
        feedback_template: Text of the slot ``{feedback}``, with ``{feedback_raw}``.
        dont_distill_on_self_success: Whether an attempt that succeeded is left out as its own solution.
        remove_thinking_from_demonstration: Whether ``<think>`` is left out of a solution.
        include_environment_feedback: Whether what the environment says is added to the feedback.
        success_threshold: Reward from which an attempt is a solution.
        max_chars: Most characters of the added message; None for no limit. One that is too long loses the end of the
            prompt, then that of the solution, never the feedback.
    """

    template: str = "{prompt}{solution}{feedback}\n\nCorrectly solve the original question.\n"
    solution_template: str = "\nCorrect solution:\n\n{successful_previous_attempt}\n\n"
    feedback_template: str = "\nThe following is feedback from your unsuccessful earlier attempt:\n\n{feedback_raw}\n\n"
    dont_distill_on_self_success: bool = True
    remove_thinking_from_demonstration: bool = False
    include_environment_feedback: bool = False
    success_threshold: float = 1.0
    max_chars: int | None = 10_240

    def __post_init__(self) -> None:
        for name, slots in (
            ("template", ("prompt", "solution", "feedback")),
            ("solution_template", ("successful_previous_attempt",)),
            ("feedback_template", ("feedback_raw",)),
        ):
            for slot in slots:
                if "{" + slot + "}" not in getattr(self, name):
                    raise ValueError(f"{name} has no slot {{{slot}}}")

    def solution_of(self, attempts: Sequence[Attempt], own: int) -> str | None:
        """Return the text of the first successful attempt of a group; None if there is none to show.

        Args:
            attempts: Attempts of the group.
            own: Index of the attempt that is asked again.
        """
        for index, attempt in enumerate(attempts):
            succeeded = attempt.reward is not None and attempt.reward >= self.success_threshold
            if succeeded and not (index == own and self.dont_distill_on_self_success):
                return attempt.text
        return None

    def text(
        self, prompt: str, *, feedback: str = "", solution: str | None = None, environment_feedback: str | None = None
    ) -> str:
        """Return the text of the added message.

        Args:
            prompt: Text of the task.
            feedback: Text that says what was wrong; empty for none.
            solution: Text of a successful attempt; None for none.
            environment_feedback: Text of the environment about the attempt; None for none.

        Raises:
            ValueError: The feedback alone is longer than ``max_chars``.
        """
        slots = self._slots(feedback, solution, environment_feedback)
        slots["prompt"] = prompt
        for slot in ("prompt", "successful_previous_attempt"):
            over = 0 if self.max_chars is None else len(self._text(slots)) - self.max_chars
            slots[slot] = slots[slot][: max(0, len(slots[slot]) - max(0, over))]
        text = self._text(slots)
        if self.max_chars is not None and len(text) > self.max_chars:
            raise ValueError(
                f"the feedback alone makes a message of {len(text)} characters, and max_chars={self.max_chars}"
            )
        return text

    def says_anything(
        self, *, feedback: str = "", solution: str | None = None, environment_feedback: str | None = None
    ) -> bool:
        """Return whether the added message would hold a solution or feedback.

        Args:
            feedback: Text that says what was wrong; empty for none.
            solution: Text of a successful attempt; None for none.
            environment_feedback: Text of the environment about the attempt; None for none.
        """
        return any(self._slots(feedback, solution, environment_feedback).values())

    def _slots(self, feedback: str, solution: str | None, environment_feedback: str | None) -> dict[str, str]:
        """Return what the slots of solution and feedback are filled with, empty for nothing."""
        said, environment = feedback.strip(), (environment_feedback or "").strip()
        shown = solution or ""
        if self.remove_thinking_from_demonstration:
            shown = without_thinking(shown)
        parts = [said] if said else []
        if self.include_environment_feedback and environment:
            parts.append(f"Environment output:\n{environment}" if said else environment)
        return {"successful_previous_attempt": shown.strip(), "feedback_raw": "\n\n".join(parts)}

    def _text(self, slots: Mapping[str, str]) -> str:
        solution = _filled(self.solution_template, successful_previous_attempt=slots["successful_previous_attempt"])
        feedback = _filled(self.feedback_template, feedback_raw=slots["feedback_raw"])
        return _filled(
            self.template,
            prompt=slots["prompt"],
            solution=solution if slots["successful_previous_attempt"] else "",
            feedback=feedback if slots["feedback_raw"] else "",
        )

    def messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        feedback: str = "",
        solution: str | None = None,
        environment_feedback: str | None = None,
    ) -> list[dict[str, Any]]:
        """Return the teacher's conversation: the student's, and the added message of the user.

        Args:
            messages: The student's conversation, up to the turn that is judged. The prompt is its last user message.
            feedback: Text that says what was wrong; empty for none.
            solution: Text of a successful attempt; None for none.
            environment_feedback: Text of the environment about the attempt; None for none.

        Raises:
            ValueError: The feedback alone is longer than ``max_chars``.
        """
        prompt = next((text_of(one.get("content")) for one in reversed(messages) if one.get("role") == "user"), "")
        text = self.text(prompt, feedback=feedback, solution=solution, environment_feedback=environment_feedback)
        return [*(dict(one) for one in messages), {"role": "user", "content": text}]


def ending_of(render: Render) -> int:
    """Return the number of tokens behind the text of a last user message: its end, and what opens the student's turn.

    Args:
        render: Function that returns a conversation's tokens.
    """
    one, other = (list(render([{"role": "user", "content": text}])) for text in ("0", "1"))
    return common_prefix(one[::-1], other[::-1])


def check_extension(student: Sequence[int], teacher: Sequence[int], ending: int) -> None:
    """Check that the teacher's prompt goes on from the student's: the same tokens up to the end of the last message.

    Args:
        student: Tokens of the student's prompt.
        teacher: Tokens of the teacher's prompt.
        ending: Number of tokens behind the text of the last message, as `ending_of` returns it.

    Raises:
        ValueError: They differ before.
    """
    shared = common_prefix(student, teacher)
    if shared < len(student) - ending:
        raise ValueError(
            f"the teacher's prompt leaves the student's after {shared} of {len(student)} tokens: the chat template "
            "renders earlier messages in another way when one more follows, so the two would not differ by the "
            "feedback alone"
        )


def _filled(template: str, **slots: str) -> str:
    """Return a template with its slots filled in one pass; braces in what is filled in mean nothing."""
    return re.sub("|".join(f"{{{name}}}" for name in slots), lambda found: slots[found[0][1:-1]], template)
