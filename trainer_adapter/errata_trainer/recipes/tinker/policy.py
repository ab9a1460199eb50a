"""`TinkerPolicy`: a student on a Tinker service: it samples, is scored, is trained, and its sampler is refreshed.

Every call has a deadline, and an answer that does not fit is a `ServiceError`, never a zero. Do not fork a process
after one is made: the SDK has threads of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import tinker
import torch
from tinker import types
from torch import Tensor

from errata_protocol.errors import ServiceError

from ...channels.sampled import top_k_lists
from ...rollouts.rollout import DpoPair, Rollout, SdpoItem
from .datums import by_token, check_pairs, of_tokens
from .losses import CustomLoss
from .service import answered, check_service, is_refusal

log = logging.getLogger("errata.trainer")

_PROBED = 8
"""Tokens that a sampling client is probed with."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the student sampled after a prompt.

    Attributes:
        ids: Tokens that were sampled.
        logprobs: Log-probability of each of ``ids``.
        stopped: Whether a stop sequence ended it; False where it was cut off at the most tokens.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a service can do beyond log-probabilities of given tokens.

    Attributes:
        top_k: Whether it returns the likeliest tokens of a prompt's positions.
        lists: Whether it trains on several targets at a position.
    """

    top_k: bool
    lists: bool


class TinkerPolicy:
    """A student on a Tinker service, and the teacher that it is compared with.

    Close it at the end, or use it in ``with``: until then the SDK sends heartbeats to the service.

    Args:
        training: The SDK's ``TrainingClient``; None for a policy that is not trained.
        sampling: The SDK's ``SamplingClient`` with the student's weights; None takes it from ``training``.
        teacher: The SDK's ``SamplingClient`` that scores with hints; None is the student itself.
        teacher_every: Number of refreshes after which the teacher takes the student's weights, with ``teacher`` None: 1
            is the student as it is, K a checkpoint every K steps, the coarse form of an average of weights.
        deadline_s: Longest time of a call, in seconds.
        tolerance: Largest mean difference between the log-probabilities with which the student's tokens were sampled
            and those with which the service scores them, in nats. It has to be above the difference between the
            service's numerics of both, and below what tokens moved by one would have.

    Attributes:
        version: Number of refreshes.

    Raises:
        ValueError: There is neither ``training`` nor ``sampling``, or a number is out of its range.
        ServiceError: The service failed.
    """

    def __init__(
        self,
        training: Any = None,
        sampling: Any = None,
        *,
        teacher: Any = None,
        teacher_every: int = 1,
        deadline_s: float = 600.0,
        tolerance: float = 0.1,
    ) -> None:
        if training is None and sampling is None:
            raise ValueError("give the SDK's training client, its sampling client, or both")
        if teacher_every < 1:
            raise ValueError(f"teacher_every is {teacher_every}: give at least 1")
        for name, value in (("deadline_s", deadline_s), ("tolerance", tolerance)):
            if not value > 0:
                raise ValueError(f"{name} is {value}: give more than 0")
        self.training, self.deadline_s, self.tolerance = training, deadline_s, tolerance
        self._teacher_every, self._follows, self.version = teacher_every, teacher is None, 0
        self._capabilities: Capabilities | None = None
        self._service: Any = None
        self._is_half_done = False
        self._checked: Any = None  # the last sampling client, beside the student's, whose scores were those it sampled
        self.sampling = self._sampler() if sampling is None else sampling
        self.teacher = self.sampling if teacher is None else teacher

    @classmethod
    def connect(
        cls,
        url: str,
        model: str,
        *,
        rank: int = 32,
        api_key: str | None = None,
        connect_s: float = 10.0,
        **options: Any,
    ) -> Self:
        """Return a policy with a new LoRA adapter on a model of a service.

        Args:
            url: Base URL of the service.
            model: Name of the model on the service.
            rank: Rank of the adapter.
            api_key: Key of the service; None takes the environment variable ``TINKER_API_KEY``.
            connect_s: Longest wait for a first answer, in seconds: the SDK itself tries for five minutes.
            **options: Further arguments of the class.

        Raises:
            ServiceError: Nothing answers there, or the service failed.
        """
        check_service(url, timeout_s=connect_s)
        deadline_s = options.get("deadline_s", 600.0)
        begun: list[Any] = []

        def made() -> Any:
            begun.append(tinker.ServiceClient(base_url=url, **({"api_key": api_key} if api_key else {})))
            return begun[0].create_lora_training_client(base_model=model, rank=rank)

        try:
            [training] = answered([made], what=f"an adapter on {model}", deadline_s=deadline_s)
            policy = cls(training, **options)
        except BaseException:
            _end(begun, "errored", deadline_s)
            raise
        policy._service = begun[0]
        return policy

    def __enter__(self) -> Self:
        """Return the policy."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the policy."""
        self.close("success" if error is None else "errored")

    def close(self, status: Literal["success", "errored", "interrupted"] = "success") -> None:
        """End the session that `connect` began. Clients that were passed to the constructor are not closed.

        Args:
            status: Word for how the run ended, which the service is told.
        """
        service, self._service = self._service, None
        if service is not None:
            _end([service], status, self.deadline_s)

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int,
        count: int = 1,
        temperature: float = 1.0,
        stop: Sequence[int] | Sequence[str] | None = None,
        seed: int | None = None,
    ) -> list[list[Sampled]]:
        """Return ``count`` samples of the student after each prompt.

        Args:
            prompts: Tokens of each prompt.
            max_tokens: Most tokens of a sample.
            count: Number of samples of each prompt.
            temperature: Temperature; leave it 1 for what is trained on.
            stop: Tokens or texts that end a sample.
            seed: Seed of the first prompt; the next ones have the next numbers. None draws others each time.

        Raises:
            ServiceError: The service failed, or gave no log-probabilities.
        """

        def asked(number: int, prompt: Sequence[int]) -> Callable[[], Any]:
            given = {"stop": list(stop)} if stop else {}
            if seed is not None:
                given["seed"] = seed + number  # type: ignore[assignment]
            settings = types.SamplingParams(max_tokens=max_tokens, temperature=temperature, **given)
            return lambda: self.sampling.sample(
                prompt=types.ModelInput.from_ints(list(prompt)), num_samples=count, sampling_params=settings
            )

        calls = [asked(number, prompt) for number, prompt in enumerate(prompts)]
        return [
            [_sampled(one) for one in answer.sequences]
            for answer in answered(calls, what="sampling", deadline_s=self.deadline_s)
        ]

    def score(self, rows: Sequence[Sequence[int]], *, sampler: Any = None) -> list[list[float | None]]:
        """Return the log-probability of each token of each row, None for a row's first.

        Args:
            rows: Tokens of each row.
            sampler: The SDK's ``SamplingClient`` that scores; default: the student's.

        Raises:
            ServiceError: The service failed, or its lists fit no row.
        """
        found = self._scores(rows, self.sampling if sampler is None else sampler)
        return [by_token(row, one) for row, one in zip(rows, found, strict=True)]

    def teacher_logprobs(
        self, rollouts: Sequence[Rollout], items: Sequence[Sequence[SdpoItem]]
    ) -> list[list[list[float]]]:
        """Return the teacher's log-probability of each error site's targets, with the hint before them.

        The student's own row of each rollout with sites is scored too, and has to have the log-probabilities with which
        it was sampled: that finds a service that counts positions otherwise, and a sampler of other weights. So call it
        before `refresh`. A teacher with a sampling client of its own samples some tokens, and scores them.

        Args:
            rollouts: Rollouts of a batch.
            items: Error sites of each rollout.

        Raises:
            ServiceError: The service failed, or what it scores is not what it sampled. Then train nothing on it.
            ValueError: A rollout with error sites has no log-probabilities.
        """
        self._check(rollouts, items)
        flat = [item for of_row in items for item in of_row]
        found = iter(self._scores([item.teacher_ids for item in flat], self.teacher))
        return [[of_tokens(item.teacher_ids, next(found), item.teacher_positions) for item in row] for row in items]

    def teacher_lists(
        self, rollouts: Sequence[Rollout], items: Sequence[Sequence[SdpoItem]], *, k: int = 20
    ) -> list[list[tuple[Tensor, Tensor]]]:
        """Return the teacher's ``k`` likeliest tokens at each error site's targets, with the hint before them.

        Args:
            rollouts: Rollouts of a batch; see `teacher_logprobs`.
            items: Error sites of each rollout.
            k: Number of tokens.

        Returns:
            For each item ``[N, k]`` int64 ids, -1 where there were fewer, and ``[N, k]`` log-probabilities.

        Raises:
            ServiceError: The service failed, what it scores is not what it sampled, or it returns no such lists.
            ValueError: A rollout with error sites has no log-probabilities.
        """
        self._check(rollouts, items)
        flat = [item for of_row in items for item in of_row]
        calls = [_top_k_call(self.teacher, item.teacher_ids, k) for item in flat]
        answers = iter(answered(calls, what=f"the teacher's {k} likeliest tokens", deadline_s=self.deadline_s))
        return [[_lists(item, next(answers), k, self.tolerance) for item in of_row] for of_row in items]

    def referred(self, pairs: Sequence[DpoPair], *, sampler: Any = None) -> list[DpoPair]:
        """Return pairs with the log-probabilities of the reference, which samples some tokens first, and scores them.

        Args:
            pairs: Pairs of channel 3.
            sampler: The SDK's ``SamplingClient`` of the reference; default: the student's, as it is now.

        Raises:
            ServiceError: The service failed, or what it scores is not what it sampled.
            ValueError: A pair has an empty context or action.
        """
        check_pairs(pairs)
        reference = self.sampling if sampler is None else sampler
        if pairs:
            self._probe(reference, pairs[0].context_ids)
        rows = [(pair, action) for pair in pairs for action in (pair.chosen_ids, pair.rejected_ids)]
        found = self._scores([pair.context_ids + action for pair, action in rows], reference)
        sums = [
            sum(of_tokens(pair.context_ids + action, one, _behind(pair.context_ids, action)))
            for (pair, action), one in zip(rows, found, strict=True)
        ]
        return [
            replace(pair, ref_chosen=chosen, ref_rejected=rejected)
            for pair, chosen, rejected in zip(pairs, sums[0::2], sums[1::2], strict=True)
        ]

    def capabilities(self) -> Capabilities:
        """Return what the service can do; it is asked once.

        Raises:
            ServiceError: The service failed, and said neither yes nor no.
        """
        if self._capabilities is None:
            self._capabilities = Capabilities(top_k=self._has_top_k(), lists=self._has_lists())
        return self._capabilities

    def step(
        self,
        data: Sequence[Any],
        *,
        custom: Sequence[tuple[Sequence[Any], CustomLoss]] = (),
        loss_fn: str = "importance_sampling",
        loss_fn_config: Mapping[str, float | str] | None = None,
        learning_rate: float = 1e-4,
        adam: Any = None,
    ) -> dict[str, float]:
        """Make one optimizer step on the sum of the losses, and return the service's metrics and those of the losses.

        The optimizer's step is sent after all gradients are there: one that failed leaves no half of a step behind in
        the weights. Gradients that the service has computed by then stay with it, and would be added to the next ones:
        after a failure this policy makes no further step. Go on from a saved state, with another training client.

        Args:
            data: Datums of ``loss_fn``, as `datums` returns them; empty for none.
            custom: Datums and the loss of each further term.
            loss_fn: Name of the service's loss.
            loss_fn_config: Settings of it.
            learning_rate: Learning rate of Adam.
            adam: The SDK's ``AdamParams``; None for those of ``learning_rate``, with the SDK's defaults.

        Raises:
            ValueError: There is nothing to train on, or no training client; or a loss refuses its Datums.
            ServiceError: The service failed, or a step before did.
        """
        if self.training is None:
            raise ValueError("this policy has no training client")
        if self._is_half_done:
            raise ServiceError(
                "a step before this one failed half-way, and its gradients may still be with the service: load a saved "
                "state, and make a policy with that training client"
            )
        terms = [(own, loss) for own, loss in custom if own]
        if not data and not terms:
            raise ValueError("there is nothing to train on: no Datum")
        calls: list[Callable[[], Any]] = []
        if data:
            calls.append(lambda: self.training.forward_backward(list(data), loss_fn, loss_fn_config))
        calls += [partial(self.training.forward_backward_custom, list(own), loss) for own, loss in terms]
        self._is_half_done = True
        passes = answered(calls, what="the gradients of a step", deadline_s=self.deadline_s)
        params = types.AdamParams(learning_rate=learning_rate) if adam is None else adam
        [stepped] = answered(
            [lambda: self.training.optim_step(params)], what="the optimizer's step", deadline_s=self.deadline_s
        )
        self._is_half_done = False
        metrics: dict[str, float] = {}
        for one in passes:
            total = metrics.get("loss:sum", 0.0) + one.metrics.get("loss:sum", 0.0)
            metrics |= {**one.metrics, "loss:sum": total}
        return {**metrics, **dict(stepped.metrics or {})}

    def refresh(self) -> None:
        """Give the student's sampler the trained weights, and the teacher if it is its turn.

        Raises:
            ServiceError: The service failed.
            ValueError: There is no training client.
        """
        if self.training is None:
            raise ValueError("this policy has no training client")
        self.sampling = self._sampler()
        self.version += 1
        if self._follows and self.version % self._teacher_every == 0:
            self.teacher = self.sampling

    def _sampler(self) -> Any:
        [made] = answered(
            [self.training.save_weights_and_get_sampling_client],
            what="a sampler with the trained weights",
            deadline_s=self.deadline_s,
        )
        return made

    def _scores(self, rows: Sequence[Sequence[int]], sampler: Any) -> list[list[float | None]]:
        calls = [partial(sampler.compute_logprobs, types.ModelInput.from_ints(list(row))) for row in rows]
        return answered(calls, what="log-probabilities", deadline_s=self.deadline_s)

    def _check(self, rollouts: Sequence[Rollout], items: Sequence[Sequence[SdpoItem]]) -> None:
        """Raise ServiceError unless rollouts with error sites are scored as they were sampled, by the student and, on
        tokens of its own, by the teacher."""
        checked = [rollout for rollout, of_row in zip(rollouts, items, strict=True) if of_row]
        rows = [rollout.prompt_ids + rollout.completion_ids for rollout in checked]
        for rollout, row, found in zip(checked, rows, self._scores(rows, self.sampling), strict=True):
            if rollout.logprobs is None:
                raise ValueError("a rollout has no log-probabilities of its sampling, so its scores cannot be checked")
            sampled = [place for place, one in enumerate(rollout.mask) if one]
            scored = of_tokens(row, found, [len(rollout.prompt_ids) + place - 1 for place in sampled])
            self._compare(scored, [rollout.logprobs[place] for place in sampled])
        if checked and self.teacher is not self.sampling:
            self._probe(self.teacher, checked[0].prompt_ids)

    def _probe(self, sampler: Any, prompt: Sequence[int]) -> None:
        """Raise ServiceError unless a sampling client scores what it samples as it samples it. A client that did is not
        asked again."""
        if sampler is self._checked:
            return
        settings = types.SamplingParams(max_tokens=_PROBED, temperature=1.0)
        ask = partial(sampler.sample, types.ModelInput.from_ints(list(prompt)), 1, settings)
        [answer] = answered([ask], what="a probe", deadline_s=self.deadline_s)
        sample = _sampled(answer.sequences[0])
        row = (*prompt, *sample.ids)
        [found] = self._scores([row], sampler)
        self._compare(of_tokens(row, found, _behind(prompt, sample.ids)), sample.logprobs)
        self._checked = sampler

    def _compare(self, scored: Sequence[float], sampled: Sequence[float]) -> None:
        """Raise ServiceError unless scores are the log-probabilities with which the tokens were sampled."""
        apart = [abs(one - other) for one, other in zip(scored, sampled, strict=True)]
        mean = sum(apart) / max(1, len(apart))
        if not mean <= self.tolerance:
            raise ServiceError(
                f"the service scores its own samples {mean:.3g} nats (mean, at most {max(apart):.3g}) apart from the "
                f"log-probabilities with which it sampled them, and tolerance={self.tolerance:g}: it counts positions "
                "otherwise, or the sampler has other weights than the one that sampled (score before refresh), or the "
                "temperature was not 1. Nothing was trained"
            )

    def _has_top_k(self) -> bool:
        answer = self._answer_unless_refused(_top_k_call(self.sampling, (0, 0), 2))
        return answer is not None and bool(answer.topk_prompt_logprobs)

    def _has_lists(self) -> bool:
        if self.training is None:
            return False
        probe = types.Datum(
            model_input=types.ModelInput.from_ints([0]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_torch(torch.zeros(1, 2, dtype=torch.int64)),
                "weights": types.TensorData.from_torch(torch.zeros(1, 2)),
            },
        )
        answer = self._answer_unless_refused(partial(self.training.forward, [probe], "cross_entropy"))
        # SkyRL takes two targets for one.
        return answer is not None and list(answer.loss_fn_outputs[0]["logprobs"].shape or ()) == [1, 2]

    def _answer_unless_refused(self, call: Callable[[], Any]) -> Any:
        """Return the answer to a call of the SDK; None if the service refuses the request."""
        try:
            return answered([call], what="a probe", deadline_s=self.deadline_s)[0]
        except ServiceError as error:
            if not is_refusal(error):
                raise
            log.info("the service cannot do what it was asked: %s", error)
            return None


def _end(services: Sequence[Any], status: str, deadline_s: float) -> None:
    """End the sessions of service clients, which some releases of the SDK cannot; a failure is logged."""
    for service in services:
        close = getattr(service, "close", None)
        if close is not None:
            try:
                answered([partial(close, status)], what="the end of the session", deadline_s=min(deadline_s, 10.0))
            except ServiceError as error:
                log.warning("the session was not ended: %s", error)


def _sampled(sequence: Any) -> Sampled:
    if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
        raise ServiceError("the service gave a sample without a log-probability for each token")
    return Sampled(tuple(sequence.tokens), tuple(map(float, sequence.logprobs)), str(sequence.stop_reason) == "stop")


def _top_k_call(sampler: Any, row: Sequence[int], k: int) -> Callable[[], Any]:
    return lambda: sampler.sample(
        prompt=types.ModelInput.from_ints(list(row)),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
    )


def _lists(item: SdpoItem, answer: Any, k: int, tolerance: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest tokens at an item's targets from the answer to `_top_k_call`. At each position of the row
    the list has to fit the log-probability of the row's own token."""
    found = answer.topk_prompt_logprobs
    if not found:
        raise ServiceError("the service returned no likeliest tokens: use the sampled form (see capabilities)")
    missing = len(item.teacher_ids) - len(found)
    if missing not in (0, 1):
        raise ServiceError(f"the service returned {len(found)} lists for a row of {len(item.teacher_ids)} tokens")
    entries: list[dict[int, float] | None] = [None, *(dict(one) if one else None for one in found[1 - missing :])]
    scores = by_token(item.teacher_ids, answer.prompt_logprobs or ())
    for place, (token, score, listed) in enumerate(zip(item.teacher_ids, scores, entries, strict=True)):
        if score is None or not listed:
            continue
        # A token that is not among the likeliest has at most the last one's log-probability.
        apart = abs(listed[token] - score) if token in listed else score - min(listed.values())
        if not apart <= tolerance:
            raise ServiceError(
                f"the service's list of token {place} of a row does not fit the log-probability {score:.3g} that it "
                f"gives the token ({apart:.3g} nats): its lists are of other positions. Nothing was trained"
            )
    try:
        return top_k_lists(entries, item.teacher_positions, k=k)
    except ValueError as error:
        raise ServiceError(f"the service returned no likeliest tokens for a target: {error}") from error


def _behind(context: Sequence[int], action: Sequence[int]) -> list[int]:
    """Return the positions that predict an action's tokens."""
    return [len(context) - 1 + place for place in range(len(action))]
