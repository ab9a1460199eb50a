"""`SdpoSession`: somebody denies an answer and says why, and the student learns from itself with that said."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...channels.sdpo import Divergence
from ...rollouts.rollout import Rollout, SdpoItem, Turn
from .datums import datums, divergence_datums
from .losses import divergence_loss
from .policy import TinkerPolicy
from .reprompt import Render, Reprompt, check_extension, ending_of

Form = Literal["auto", "sampled", "top_k"]

log = logging.getLogger("errata.trainer")


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer of the student.

    Attributes:
        messages: Conversation that it answers.
        prompt_ids: Tokens of the conversation.
        ids: Tokens of the answer.
        logprobs: Log-probability of each of ``ids``.
        version: `TinkerPolicy.version` of the student that answered; None if unknown.
    """

    messages: tuple[Mapping[str, Any], ...]
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int | None = None


@dataclass(frozen=True, slots=True)
class Denial:
    """A denied answer, ready to be trained on.

    Attributes:
        rollout: The answer as a rollout of one turn.
        item: The answer behind the teacher's prompt.
        advantage: Advantage of the answer beside channel 2.
    """

    rollout: Rollout
    item: SdpoItem
    advantage: float = 0.0


class SdpoSession:
    """Collects denied answers, and trains on them.

    Args:
        policy: The student on a service.
        render: Function that returns a conversation's tokens with what opens the student's turn.
        reprompt: Templates and options of the teacher's prompt; default: those of the paper's code.
        stop: Tokens or texts that end an answer.
        form: Form of channel 2: the sampled tokens, the teacher's likeliest ones (`divergence_loss`), or ``auto``, the
            second where the service can, with a message where it cannot.
        top_k: Number of the teacher's likeliest tokens.
        divergence: Divergence of the form ``top_k``; default: the generalized JSD of the lists with their tail.

    Attributes:
        denials: Denied answers since the last step.
        steps: Number of steps made.
    """

    def __init__(
        self,
        policy: TinkerPolicy,
        render: Render,
        *,
        reprompt: Reprompt | None = None,
        stop: Sequence[int] | Sequence[str] | None = None,
        form: Form = "sampled",
        top_k: int = 20,
        divergence: Divergence | None = None,
    ) -> None:
        if form not in ("auto", "sampled", "top_k"):
            raise ValueError(f"form is {form!r}: 'auto', 'sampled' or 'top_k'")
        if top_k < 1:
            raise ValueError(f"top_k is {top_k}: give at least 1")
        self.policy, self.render, self.reprompt, self.stop = policy, render, reprompt or Reprompt(), stop
        self.form, self.top_k, self.divergence = form, top_k, divergence
        self.denials: list[Denial] = []
        self.steps = 0
        self._ending = ending_of(render)

    def sample(
        self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int, count: int = 1, seed: int | None = None
    ) -> list[Completion]:
        """Return answers of the student to a conversation.

        Args:
            messages: The conversation.
            max_tokens: Most tokens of an answer.
            count: Number of answers.
            seed: Seed; None draws others each time.

        Raises:
            ServiceError: The service failed.
        """
        prompt = tuple(self.render(messages))
        [found] = self.policy.sample([prompt], max_tokens=max_tokens, count=count, stop=self.stop, seed=seed)
        version = self.policy.version
        return [Completion(tuple(messages), prompt, one.ids, one.logprobs, version) for one in found]

    def record_denial(
        self,
        completion: Completion,
        feedback: str,
        *,
        solution: str | None = None,
        environment_feedback: str | None = None,
        advantage: float = 0.0,
    ) -> bool:
        """Add a denied answer to those of the next step.

        Args:
            completion: The answer, of the student as it is now.
            feedback: Text that says what was wrong.
            solution: Text of a successful attempt; see `Reprompt.solution_of`.
            environment_feedback: Text of the environment about the attempt, e.g. the hint of its error marker; None for
                none. It is used with `Reprompt.include_environment_feedback`.
            advantage: Advantage of the answer beside channel 2, e.g. its reward minus its group's mean: the hybrid.

        Returns:
            Whether it was added: an answer without tokens, or with nothing that the teacher would be told, teaches
            nothing.

        Raises:
            ValueError: The student was refreshed since it answered; or the chat template renders the conversation in
                another way when the feedback follows; or the feedback is longer than `Reprompt.max_chars`.
        """
        if completion.version not in (None, self.policy.version):
            raise ValueError("the student was refreshed since it gave this answer: let it answer again")
        feedbacks: dict[str, Any] = {
            "feedback": feedback,
            "solution": solution,
            "environment_feedback": environment_feedback,
        }
        if not completion.ids or not self.reprompt.says_anything(**feedbacks):
            return False
        prompt = tuple(self.render(self.reprompt.messages(completion.messages, **feedbacks)))
        check_extension(completion.prompt_ids, prompt, self._ending)
        tokens, student, teacher = len(completion.ids), len(completion.prompt_ids), len(prompt)
        rollout = Rollout(
            completion.prompt_ids,
            completion.ids,
            (1,) * tokens,
            (Turn(0, 0, tokens),),
            logprobs=completion.logprobs,
        )
        item = SdpoItem(
            0,
            prompt + completion.ids,
            tuple(range(student - 1, student - 1 + tokens)),
            tuple(range(teacher - 1, teacher - 1 + tokens)),
            completion.ids,
        )
        self.denials.append(Denial(rollout, item, advantage))
        return True

    def train_sdpo(
        self, *, learning_rate: float = 1e-4, alpha_sdpo: float = 1.0, clip: float | None = None, refresh: bool = True
    ) -> dict[str, float]:
        """Make a step on the denied answers, and forget them.

        Losses are means over the tokens of the answers.

        Args:
            learning_rate: Learning rate of Adam.
            alpha_sdpo: Weight of channel 2 beside the advantages.
            clip: Upper bound of the absolute log-ratio of the sampled form, in nats; None for no bound.
            refresh: Whether the student's sampler gets the new weights. Without, call `refresh` before the next answer.

        Returns:
            Metrics: ``sdpo/sites``, ``sdpo/tokens`` and ``sdpo/kl``, an estimate of the divergence before the step in
            nats a token, and what the service says. Empty if nothing was denied.

        Raises:
            ServiceError: The service failed, or scores other positions. Where ``denials`` are still there, nothing was
                trained: call it again, or, if the step itself failed, go on from a saved state with another policy.
                Where they are gone, the step was made and the sampler not refreshed: call `refresh`.
            ValueError: The policy has no training client.
        """
        if not self.denials:
            return {}
        rollouts, items = [one.rollout for one in self.denials], [[one.item] for one in self.denials]
        advantages = [one.advantage for one in self.denials]
        tokens = sum(len(one.item.target_ids) for one in self.denials)
        metrics = {"sdpo/sites": float(len(self.denials)), "sdpo/tokens": float(tokens)}
        if self._uses_lists():
            lists = self.policy.teacher_lists(rollouts, items, k=self.top_k)
            flat, found = [one.item for one in self.denials], [one for of_row in lists for one in of_row]
            loss = divergence_loss(flat, found, divergence=self.divergence, scale=alpha_sdpo / tokens)
            data = datums(rollouts, advantages=advantages, scale=1 / tokens) if any(advantages) else []
            targets = divergence_datums(rollouts, items, [[ids for ids, _ in of_row] for of_row in lists])
            of_step = self.policy.step(data, custom=[(targets, loss)], learning_rate=learning_rate)
        else:
            teacher = self.policy.teacher_logprobs(rollouts, items)
            data = datums(
                rollouts,
                items,
                advantages=advantages,
                teacher_logprobs=teacher,
                alpha_sdpo=alpha_sdpo,
                clip=clip,
                scale=1 / tokens,
            )
            own = [one for denial in self.denials for one in denial.rollout.logprobs or ()]
            other = [one for of_row in teacher for of_item in of_row for one in of_item]
            metrics["sdpo/kl"] = sum(a - b for a, b in zip(own, other, strict=True)) / tokens
            of_step = self.policy.step(data, learning_rate=learning_rate)
        self.denials = []
        self.steps += 1
        if refresh:
            self.refresh()
        return {**of_step, **metrics}

    def refresh(self) -> None:
        """Give the student's sampler the trained weights; see `TinkerPolicy.refresh`.

        Raises:
            ServiceError: The service failed.
        """
        self.policy.refresh()

    def _uses_lists(self) -> bool:
        if self.form != "auto":
            return self.form == "top_k"
        found = self.policy.capabilities()
        if found.top_k and found.lists:
            return True
        log.warning("the service has no lists of likeliest tokens to train on: channel 2 compares sampled tokens")
        self.form = "sampled"
        return False
