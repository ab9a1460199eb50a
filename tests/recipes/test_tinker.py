"""SDPO on a Tinker service: the real SDK over HTTP, against a local service around a small model."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import math
import runpy
import socket
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from recorded_cases import CASES, items_of, pairs_of, rollouts
from tinker._client import AsyncTinker
from toy_models import VOCABULARY, toy

from errata_protocol.errors import ServiceError
from errata_trainer import DpoPair, Rollout, SdpoItem
from errata_trainer.channels.dpo import dpo_losses
from errata_trainer.channels.sampled import sampled_token_loss_from_logprobs, top_k_divergence
from errata_trainer.channels.sdpo import Divergence
from errata_trainer.recipes.tinker import (
    Attempt,
    Capabilities,
    Completion,
    Reprompt,
    SdpoSession,
    TinkerPolicy,
    datums,
    divergence_datums,
    divergence_loss,
    group_advantages,
    pair_datums,
    preference_loss,
)
from errata_trainer.recipes.tinker.datums import by_token, of_tokens
from errata_trainer.recipes.tinker.reprompt import check_extension, ending_of
from errata_trainer.recipes.tinker.service import answered, check_service
from tests.machine_speed import SLOWDOWN

from .spoiled_service import Faults, SpoiledService

SEVERAL = "many sites"


@contextlib.contextmanager
def started() -> Iterator[SpoiledService]:
    """Run a service."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("TINKER_TELEMETRY", "0")
        patched.setenv("TINKER_API_KEY", "tml-test")
        model = toy("qwen3").float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() == 2 else 1.0)  # so that what is said before an answer matters
        with SpoiledService(model) as service:
            yield service


@pytest.fixture(scope="module")
def shared_service() -> Iterator[SpoiledService]:
    with started() as service:
        yield service


OPEN: list[TinkerPolicy] = []


@pytest.fixture
def service(shared_service: SpoiledService) -> Iterator[SpoiledService]:
    shared_service.faults = Faults()
    shared_service.calls.clear()
    yield shared_service
    shared_service.faults = Faults()
    while OPEN:
        OPEN.pop().close()


def policy_of(service: SpoiledService, **options: Any) -> TinkerPolicy:
    OPEN.append(TinkerPolicy.connect(service.url, "tiny", **{"deadline_s": 60 * SLOWDOWN, **options}))
    return OPEN[-1]


def logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    """Return the log-probability of each token of a row but the first, attached."""
    found = model(torch.tensor([list(ids)])).logits[0, :-1].float().log_softmax(-1)
    return found.gather(-1, torch.tensor(ids)[1:, None])[:, 0]


def row_of(rollout: Rollout) -> tuple[int, ...]:
    return rollout.prompt_ids + rollout.completion_ids


def sampled(service: SpoiledService, rows: Sequence[Rollout]) -> list[Rollout]:
    """Return rollouts with the log-probabilities that the service's model gives their tokens."""
    made = []
    for rollout in rows:
        with torch.no_grad():
            found = logprobs(service.base, row_of(rollout))[len(rollout.prompt_ids) - 1 :].tolist()
        known = tuple(one if m else 0.0 for one, m in zip(found, rollout.mask, strict=True))
        made.append(replace(rollout, logprobs=known))
    return made


def batch(service: SpoiledService, name: str = SEVERAL) -> tuple[list[Rollout], list[tuple[SdpoItem, ...]]]:
    rows = sampled(service, rollouts(CASES[name]))
    items = items_of(CASES[name], rows)
    return rows, [tuple(replace(item, weight=0.5 + index) for index, item in enumerate(of_row)) for of_row in items]


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.norm() > 1e-3
    assert float((found - expected).norm() / expected.norm()) < 1e-5


# -- the arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_datum_has_the_gradient_of_channels_1_and_2(service: SpoiledService, name: str) -> None:
    rows, items = batch(service, name)
    policy = policy_of(service)
    teacher = policy.teacher_logprobs(rows, items)
    advantages, alpha, scale = [0.7 - 0.5 * row for row in range(len(rows))], 0.3, 0.25
    made = datums(rows, items, advantages=advantages, teacher_logprobs=teacher, alpha_sdpo=alpha, scale=scale)
    policy.training.forward_backward(made, "importance_sampling").result()
    model, loss = copy.deepcopy(service.base), torch.zeros(())
    for rollout, advantage, of_row in zip(rows, advantages, items, strict=True):
        own = logprobs(model, row_of(rollout))
        mask = torch.tensor(rollout.mask, dtype=torch.float32)
        loss = loss - advantage * (own[len(rollout.prompt_ids) - 1 :] * mask).sum()
        for item in of_row:
            with torch.no_grad():
                other = logprobs(service.base, item.teacher_ids)[list(item.teacher_positions)]
            student = own[list(item.student_positions)]
            each = sampled_token_loss_from_logprobs(student[None], other[None], torch.ones(1, len(other)).bool())
            loss = loss + alpha * item.weight * len(other) * each
    (scale * loss).backward()
    close(gradients(service.trained[-1]), gradients(model))


def test_advantages_of_turns_stand_at_their_tokens(service: SpoiledService) -> None:
    [row] = sampled(service, rollouts(CASES["one row"]))
    [datum] = datums([row], advantages=[[1.0, -2.0, 3.0]], scale=0.5)
    found = datum.loss_fn_inputs["advantages"].data
    before = len(row.prompt_ids) - 1
    expected = [0.0] * len(found)
    for turn, value in zip(row.turns, (0.5, -1.0, 1.5), strict=True):
        expected[before + turn.start : before + turn.stop] = [value] * (turn.stop - turn.start)
    assert found == expected
    assert datum.loss_fn_inputs["target_tokens"].data == list(row_of(row)[1:])
    assert datum.model_input.to_ints() == list(row_of(row)[:-1])


def test_what_was_lost_is_no_datum_and_counts_for_no_mean(service: SpoiledService) -> None:
    rows = sampled(service, rollouts(CASES[SEVERAL]))
    rewards: list[float | None] = [1.0, None, 0.0]
    rows = [replace(row, reward=reward) for row, reward in zip(rows, rewards, strict=True)]
    rows[1] = replace(rows[1], lost="SESSION_LOST: the server was killed", reward=0.0)
    advantages = group_advantages(rows, ["a", "a", "a"])
    assert advantages == [0.5, 0.0, -0.5]
    assert len(datums(rows, advantages=advantages)) == 2
    assert group_advantages(rows, ["a", "b", "b"]) == [0.0, 0.0, 0.0]  # alone in their groups
    split = [replace(rows[0], eid=eid, reward=reward) for eid, reward in (("x", 1.0), ("x", 1.0), ("y", 0.0))]
    assert group_advantages(split, ["a", "a", "a"]) == [0.5, 0.5, -0.5]  # an episode in two rollouts counts once
    assert group_advantages(split[:2], ["a", "a"]) == [0.0, 0.0]


def test_a_rollout_without_logprobs_is_refused(service: SpoiledService) -> None:
    rows, items = rollouts(CASES["one row"]), items_of(CASES["one row"], rollouts(CASES["one row"]))
    with pytest.raises(ValueError, match="rollout 0 has no log-probabilities"):
        datums(rows, advantages=[1.0])
    with pytest.raises(ValueError, match="no log-probabilities of its sampling"):
        policy_of(service).teacher_logprobs(rows, items)
    with pytest.raises(ValueError, match="turn 0 has 3 targets and 1 log-probabilities"):
        known = sampled(service, rows)
        datums(known, items, advantages=[1.0], teacher_logprobs=[[[-1.0], [-1.0]]])
    for options, words in (
        ({"advantages": [[1.0, 2.0]]}, "rollout 0 has 3 turns, and 2 advantages"),
        ({"advantages": [[1.0] * 9]}, "rollout 0 has 3 turns, and 9 advantages"),
        ({"advantages": []}, "1 rollouts, and advantages of 0"),
        ({"advantages": [math.nan]}, "rollout 0 has a log-probability or an advantage that is not finite"),
        ({"advantages": [1.0], "items": items}, "rollout 0 has 2 error sites, and teacher_logprobs of 0"),
    ):
        with pytest.raises(ValueError, match=words):
            datums(known, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rollout 0 is lost and has error sites"):
        divergence_datums([replace(known[0], lost="x")], items, [[torch.zeros(3, 1), torch.zeros(2, 1)]])


def some_pairs(service: SpoiledService) -> list[DpoPair]:
    rows = rollouts(CASES[SEVERAL])
    found = [pair for of_row in pairs_of(CASES[SEVERAL], rows) for pair in of_row]
    return [replace(pair, weight=0.5 + index) for index, pair in enumerate(found)]


@pytest.mark.parametrize("loss_type", ["sigmoid", "sigmoid_norm"])
def test_pairs_have_the_loss_and_gradient_of_channel_3(service: SpoiledService, loss_type: Any) -> None:
    policy = policy_of(service)
    pairs = policy.referred(some_pairs(service))
    loss = preference_loss(pairs, beta_dpo=0.3, loss_type=loss_type, scale=0.25)
    answer = policy.training.forward_backward_custom(pair_datums(pairs), loss).result()
    weights = sum(pair.weight for pair in pairs)
    assert answer.metrics["loss:sum"] == pytest.approx(0.25 * weights * math.log(2), rel=1e-4)
    assert answer.metrics["dpo/margin"] == pytest.approx(0, abs=1e-3)
    model = copy.deepcopy(service.base)

    def summed(pair: DpoPair, action: tuple[int, ...]) -> torch.Tensor:
        return logprobs(model, pair.context_ids + action)[-len(action) :].sum()

    chosen, rejected = (
        torch.stack([summed(pair, getattr(pair, side)) for pair in pairs]) for side in ("chosen_ids", "rejected_ids")
    )
    expected = dpo_losses(
        chosen,
        rejected,
        chosen.detach(),
        rejected.detach(),
        beta_dpo=0.3,
        loss_type=loss_type,
        lengths=(
            torch.tensor([len(pair.chosen_ids) for pair in pairs]),
            torch.tensor([len(pair.rejected_ids) for pair in pairs]),
        ),
    )
    (0.25 * (expected * torch.tensor([pair.weight for pair in pairs])).sum()).backward()
    close(gradients(service.trained[-1]), gradients(model))


def test_pairs_without_a_reference_are_refused(service: SpoiledService) -> None:
    with pytest.raises(ValueError, match=r"pair 0 has no reference log-probabilities: see TinkerPolicy\.referred"):
        preference_loss(some_pairs(service))
    empty = [replace(some_pairs(service)[0], chosen_ids=(), ref_chosen=0.0, ref_rejected=0.0)]
    policy = policy_of(service)
    for use in (pair_datums, preference_loss, policy.referred):
        with pytest.raises(ValueError, match="pair 0 has an empty context or action"):
            use(empty)  # type: ignore[operator]


@pytest.mark.parametrize(
    "divergence",
    [None, Divergence(0.0, top_k=5), Divergence(1.0, top_k=5, tail=True, token_clip=0.05)],
    ids=["default", "forward", "reverse, clipped"],
)
def test_lists_have_the_gradient_of_the_divergence(service: SpoiledService, divergence: Divergence | None) -> None:
    rows, items = batch(service)
    policy = policy_of(service)
    lists = policy.teacher_lists(rows, items, k=5)
    flat, found = [one for of_row in items for one in of_row], [one for of_row in lists for one in of_row]
    made = divergence_datums(rows, items, [[ids for ids, _ in of_row] for of_row in lists])
    loss = divergence_loss(flat, found, divergence=divergence, scale=0.25)
    answer = policy.training.forward_backward_custom(made, loss).result()
    used = divergence or Divergence(top_k=5, tail=True)
    model, expected = copy.deepcopy(service.base), torch.zeros(())
    for rollout, of_row in zip(rows, items, strict=True):
        for item in of_row:
            student = model(torch.tensor([row_of(rollout)])).logits[0][list(item.student_positions)]
            with torch.no_grad():
                logits = service.base(torch.tensor([item.teacher_ids])).logits[0][list(item.teacher_positions)]
                values, ids = logits.float().log_softmax(-1).topk(5, -1)
            each = top_k_divergence(
                student, ids, values, jsd_beta=used.jsd_beta, tail=used.tail, token_clip=used.token_clip
            )
            expected = expected + item.weight * each.sum()
    (0.25 * expected).backward()
    assert answer.metrics["loss:sum"] == pytest.approx(0.25 * float(expected.detach()), rel=1e-4)
    close(gradients(service.trained[-1]), gradients(model))


def test_losses_of_other_data_are_refused(service: SpoiledService) -> None:
    policy = policy_of(service)
    pairs = policy.referred(some_pairs(service))
    with pytest.raises(ValueError, match="0 Datums for"):
        preference_loss(pairs)([], [])
    with pytest.raises(ValueError, match="1 Datums for 0 items"):
        divergence_loss([], [])([None], [torch.zeros(1)])
    with pytest.raises(ValueError, match=r"temperature is 2\.0"):
        divergence_loss([], [], divergence=Divergence(temperature=2.0))
    with pytest.raises(ValueError, match="support is 'student'"):
        divergence_loss([], [], divergence=Divergence(top_k=3, support="student"))


# -- alignment ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_first", [True, False], ids=["an entry for each token", "none for the first"])
def test_both_forms_of_scores_are_aligned(service: SpoiledService, has_first: bool) -> None:
    service.faults.has_first = has_first
    rows, items = batch(service)
    policy = policy_of(service)
    found = policy.teacher_logprobs(rows, items)
    for of_row, scores in zip(items, found, strict=True):
        for item, score in zip(of_row, scores, strict=True):
            with torch.no_grad():
                expected = logprobs(service.base, item.teacher_ids)[list(item.teacher_positions)]
            assert score == pytest.approx(expected.tolist(), abs=1e-5)
    [row] = policy.score([(5, 6, 7)])
    assert row[0] is None and all(one is not None and one < 0 for one in row[1:])


@pytest.mark.parametrize("has_first", [True, False], ids=["an entry for each token", "none for the first"])
@pytest.mark.parametrize("moved", [1, -1])
def test_scores_of_other_positions_are_refused(service: SpoiledService, has_first: bool, moved: int) -> None:
    rows, items = batch(service)
    policy = policy_of(service)
    service.faults.has_first, service.faults.moved = has_first, moved
    for ask in (policy.teacher_logprobs, policy.teacher_lists):
        with pytest.raises(ServiceError, match=r"from the log-probabilities with which it sampled them|returned"):
            ask(rows, items)
    with pytest.raises(ServiceError, match=r"from the log-probabilities with which it sampled them|returned"):
        policy.referred(some_pairs(service))
    assert service.calls["optim_step"] == 0


@pytest.mark.parametrize("moved", [1, -1])
def test_a_teacher_of_its_own_is_checked_too(service: SpoiledService, moved: int) -> None:
    rows, items = batch(service)
    with SpoiledService(copy.deepcopy(service.base)) as other, policy_of(other) as theirs:
        policy = policy_of(service, teacher=theirs.sampling)
        other.faults.moved = moved
        with pytest.raises(ServiceError, match=r"from the log-probabilities with which it sampled them|returned"):
            policy.teacher_logprobs(rows, items)
        other.faults.moved = 0
        policy.teacher_logprobs(rows, items)
        before = other.calls["asample"]
        policy.teacher_logprobs(rows, items)
        assert other.calls["asample"] - before == sum(map(len, items))  # it is not probed again


@pytest.mark.parametrize("k", [1, 3, 20])
def test_lists_of_other_positions_are_refused(service: SpoiledService, k: int) -> None:
    rows, items = batch(service)
    policy = policy_of(service)
    policy.teacher_lists(rows, items, k=k)
    for moved in (1, 2, -1, -2):
        service.faults.lists_moved = moved
        with pytest.raises(ServiceError, match=r"its lists are of other positions\. Nothing was trained"):
            policy.teacher_lists(rows, items, k=k)


def test_a_sampler_of_other_weights_is_refused(service: SpoiledService) -> None:
    rows, items = batch(service)
    policy = policy_of(service)
    policy.step(datums(rows, advantages=[1.0] * len(rows)), learning_rate=0.1)
    policy.refresh()
    with pytest.raises(ServiceError, match="score before refresh"):
        policy.teacher_logprobs(rows, items)


def test_lists_that_fit_no_row_are_refused() -> None:
    assert by_token([1, 2, 3], [None, -1.0, -2.0]) == by_token([1, 2, 3], [-1.0, -2.0]) == [None, -1.0, -2.0]
    for found in ([], [-1.0], [-1.0] * 4):
        with pytest.raises(ServiceError, match=f"returned {len(found)} log-probabilities for a row of 3 tokens"):
            by_token([1, 2, 3], found)
    for wrong in (None, math.nan, -math.inf):
        with pytest.raises(ServiceError, match="as the log-probability of token 2 of a row"):
            of_tokens([1, 2, 3], [None, -1.0, wrong], [1])


# -- failures of the service -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["asample", "retrieve_future"])
def test_a_hung_service_is_given_up_at_the_deadline(service: SpoiledService, name: str) -> None:
    policy = policy_of(service)
    service.faults.hanging = {name}
    policy.deadline_s = 0.2
    with pytest.raises(ServiceError, match=r"sampling: the Tinker service did not answer within deadline_s=0\.2 s"):
        policy.sample([(5, 6)], max_tokens=2)


def test_the_session_is_ended_once() -> None:
    with (
        started() as service,  # of its own: a policy of an earlier test may still be ending its session
        TinkerPolicy.connect(service.url, "tiny", deadline_s=60 * SLOWDOWN) as policy,
    ):
        given = TinkerPolicy(policy.training)
        given.close()
        assert not any("finish" in name for name in service.calls)
        assert given.sample([(5, 6)], max_tokens=1)
        policy.close()
        policy.close()
        assert sum(count for name, count in service.calls.items() if "finish" in name) == 1
        with pytest.raises(ServiceError, match="the Tinker service failed: RuntimeError"):
            policy.sample([(5, 6)], max_tokens=1)


def test_an_sdk_client_that_is_collected_closes_no_connection_later(service: SpoiledService) -> None:
    """The connection's number may be another's by then."""

    async def collected() -> set[asyncio.Task[Any]]:
        client = AsyncTinker(base_url=service.url, api_key="tml-test")
        await client.get("/api/v1/healthz", cast_to=httpx.Response)
        gone = weakref.ref(client)
        del client
        gc.collect()
        assert gone() is None
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(collected()) == set()


def test_nobody_there_is_said_without_the_sdks_five_minutes() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ServiceError, match=f"no Tinker service answers at {url} .ConnectError"):
            TinkerPolicy.connect(url, "tiny")
    with pytest.raises(ServiceError, match="start it, or give its base URL"):
        check_service("http://[::1")


@pytest.mark.parametrize("status", [400, 422])
def test_a_refusal_is_an_error_with_the_services_words(service: SpoiledService, status: int) -> None:
    rows, items = batch(service)
    policy = policy_of(service)
    service.faults.refused = {"forward_backward": status}
    with pytest.raises(ServiceError, match=f"the gradients of a step: .*{status}.*refused by the test"):
        policy.step(datums(rows, advantages=[1.0] * len(rows)))
    assert service.calls["optim_step"] == 0
    service.faults.refused = {}
    with pytest.raises(ServiceError, match=r"a step before this one failed half-way.*load a saved state"):
        policy.step(datums(rows, advantages=[1.0] * len(rows)))
    service.faults.refused = {"asample": status}
    with pytest.raises(ServiceError, match=f"log-probabilities: .*{status}"):
        policy.teacher_logprobs(rows, items)


def test_a_step_of_nothing_and_wrong_options_are_refused(service: SpoiledService) -> None:
    policy = policy_of(service)
    with pytest.raises(ValueError, match="nothing to train on"):
        policy.step([])
    with pytest.raises(ValueError, match="no training client"):
        TinkerPolicy(sampling=policy.sampling).step([])
    with pytest.raises(ValueError, match="no training client"):
        TinkerPolicy(sampling=policy.sampling).refresh()
    with pytest.raises(ValueError, match="training client, its sampling client, or both"):
        TinkerPolicy()
    for name in ("deadline_s", "tolerance", "teacher_every"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            TinkerPolicy(sampling=policy.sampling, **{name: 0})


def test_what_a_service_can_is_asked_once(service: SpoiledService) -> None:
    policy = policy_of(service)
    assert policy.capabilities() == Capabilities(top_k=True, lists=True)
    before = service.calls.copy()
    policy.capabilities()
    assert service.calls == before
    service.faults = Faults(has_top_k=False, has_lists=False)
    assert policy_of(service).capabilities() == Capabilities(top_k=False, lists=False)
    failing = policy_of(service)
    service.faults, failing.deadline_s = Faults(hanging={"asample"}), 0.5
    with pytest.raises(ServiceError, match="did not answer within"):
        failing.capabilities()
    service.faults, failing.deadline_s = Faults(), 60 * SLOWDOWN
    assert failing.capabilities() == Capabilities(top_k=True, lists=True)  # a failure is no answer


def test_a_custom_pass_that_failed_ends_the_training_client(service: SpoiledService) -> None:
    policy = policy_of(service)
    pairs = policy.referred(some_pairs(service))
    with pytest.raises(ValueError, match="Datums for"):
        policy.step([], custom=[(pair_datums(pairs), preference_loss(pairs[:1]))])
    with pytest.raises(ServiceError, match="a step before this one failed half-way"):
        policy.step([], custom=[(pair_datums(pairs), preference_loss(pairs))])
    with pytest.raises(ServiceError, match="the Tinker service failed: RuntimeError"):
        TinkerPolicy(policy.training)  # the SDK's client takes nothing more


def test_calls_that_were_given_up_are_not_made_later() -> None:
    blocked, made, before = threading.Event(), [], set(threading.enumerate())
    with pytest.raises(ServiceError, match="did not answer within"):
        answered([blocked.wait, lambda: made.append(1)], what="x", deadline_s=0.01)
    blocked.set()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert made == []


def test_the_metrics_of_all_passes_are_added_up(service: SpoiledService) -> None:
    rows, _ = batch(service)
    policy = policy_of(service)
    pairs = policy.referred(some_pairs(service))
    custom = [(pair_datums(pairs), preference_loss(pairs, scale=1.0))]
    alone = policy.step([], custom=custom, learning_rate=1e-9)["loss:sum"]
    both = policy.step(datums(rows, advantages=[1.0] * len(rows)), custom=custom, learning_rate=1e-9)
    sampled_tokens = sum(sum(row.mask) for row in rows)
    assert both["loss:sum"] == pytest.approx(alone - sampled_tokens, rel=1e-3)
    assert {"dpo/margin", "grad_norm"} <= set(both)


# -- the loop ----------------------------------------------------------------------------------------------------------

TASK = ({"role": "user", "content": "7 8 9"},)


def render(messages: Sequence[Any]) -> list[int]:
    """Return a token for each word, 3 before a message and 2 before an answer."""
    ids = []
    for message in messages:
        ids += [3, *(int(word) if word.isdigit() else 4 + len(word) % 7 for word in message["content"].split())]
    return [*ids, 2]


REPROMPT = Reprompt("{prompt}{solution}{feedback}", feedback_template=" {feedback_raw}")


def divergence_of(service: SpoiledService, answers: Sequence[Completion], model: Any) -> float:
    """Return KL(teacher with feedback || student) on fixed tokens, in nats a token."""
    prompt = render([*TASK, {"role": "user", "content": "7 8 9 41 42 43"}])
    sums, count = 0.0, 0
    for answer in answers:
        length = len(answer.ids)
        with torch.no_grad():
            teacher = service.base(torch.tensor([[*prompt, *answer.ids]])).logits[0, -length - 1 : -1].log_softmax(-1)
            student = model(torch.tensor([[*answer.prompt_ids, *answer.ids]])).logits[0, -length - 1 : -1]
        sums += float((teacher.exp() * (teacher - student.log_softmax(-1))).sum())
        count += length
    return sums / count


@pytest.mark.recipes
def test_denied_answers_move_the_student_towards_the_teacher(service: SpoiledService) -> None:
    policy = policy_of(service)
    session = SdpoSession(policy, render, reprompt=REPROMPT)
    answers = session.sample(TASK, max_tokens=8, count=8, seed=7)
    for answer in answers:
        assert session.record_denial(answer, "41 42 43")
    items = [[denial.item] for denial in session.denials]
    teacher = policy.teacher_logprobs([denial.rollout for denial in session.denials], items)
    metrics = session.train_sdpo(learning_rate=1e-3)
    assert metrics["sdpo/sites"] == 8 and metrics["sdpo/tokens"] == 64
    gaps = [
        t - s for answer, [of] in zip(answers, teacher, strict=True) for t, s in zip(of, answer.logprobs, strict=True)
    ]
    assert metrics["sdpo/kl"] == pytest.approx(-sum(gaps) / 64, abs=1e-4)
    again = policy.score([answer.prompt_ids + answer.ids for answer in answers])  # by the sampler that was refreshed
    now = [one for row in again for one in row[-8:] if one is not None]
    before = [one for answer in answers for one in answer.logprobs]
    assert sum(gap * (new - old) for gap, new, old in zip(gaps, now, before, strict=True)) > 0


@pytest.mark.recipes
def test_the_divergence_falls_with_lists(service: SpoiledService) -> None:
    policy = policy_of(service, teacher_every=1000)
    session = SdpoSession(policy, render, reprompt=REPROMPT, form="top_k", top_k=20)
    fixed = session.sample(TASK, max_tokens=8, count=8, seed=7)
    before = divergence_of(service, fixed, service.trained[-1])
    for step in range(5):
        for answer in session.sample(TASK, max_tokens=8, count=6, seed=100 * step):
            assert session.record_denial(answer, "41 42 43")
        assert session.train_sdpo(learning_rate=0.01)["sdpo/kl"] > 0
    assert session.steps == 5 and not session.denials
    assert divergence_of(service, fixed, service.trained[-1]) < 0.85 * before


def test_auto_takes_lists_where_the_service_has_them(service: SpoiledService) -> None:
    norms = []
    for form in ("auto", "top_k", "sampled"):
        session = SdpoSession(policy_of(service), render, reprompt=REPROMPT, form=form)  # type: ignore[arg-type]
        for answer in session.sample(TASK, max_tokens=4, count=2, seed=5):
            session.record_denial(answer, "41 42 43")
        norms.append(session.train_sdpo()["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] != pytest.approx(norms[2], rel=0.01)


def test_a_service_without_lists_gets_the_sampled_form_and_it_is_said(
    service: SpoiledService, caplog: pytest.LogCaptureFixture
) -> None:
    service.faults.has_lists = False
    session = SdpoSession(policy_of(service), render, reprompt=REPROMPT, form="auto")
    [answer] = session.sample(TASK, max_tokens=4, seed=1)
    assert session.record_denial(answer, "41 42")
    with caplog.at_level(logging.WARNING, "errata.trainer"):
        session.train_sdpo()
    assert "channel 2 compares sampled tokens" in caplog.text
    assert session.form == "sampled"


def test_nothing_said_teaches_nothing(service: SpoiledService) -> None:
    session = SdpoSession(policy_of(service), render)
    before = service.calls["forward_backward"]
    [answer] = session.sample(TASK, max_tokens=4, seed=1)
    assert not session.record_denial(answer, "  \n")
    assert not session.record_denial(replace(answer, ids=(), logprobs=()), "41")
    assert not session.record_denial(answer, "", environment_feedback="41")  # not included
    assert session.train_sdpo() == {}
    assert service.calls["forward_backward"] == before and session.steps == 0
    session.reprompt = Reprompt(include_environment_feedback=True)
    assert session.record_denial(answer, "", environment_feedback="41")
    assert session.record_denial(answer, "", solution="42")
    session.reprompt = Reprompt(remove_thinking_from_demonstration=True)
    for nothing in ("<think>x</think>", "x</think>\n", " \n"):
        assert not session.record_denial(answer, "", solution=nothing)


def test_answers_are_kept_where_the_service_failed(service: SpoiledService) -> None:
    session = SdpoSession(policy_of(service), render, reprompt=REPROMPT)
    [answer] = session.sample(TASK, max_tokens=4, seed=1)
    session.record_denial(answer, "41 42")
    service.faults.refused = {"forward_backward": 400}
    with pytest.raises(ServiceError, match="the gradients of a step"):
        session.train_sdpo()
    assert len(session.denials) == 1 and session.steps == 0


def test_a_step_whose_refresh_failed_is_made(service: SpoiledService) -> None:
    session = SdpoSession(policy_of(service), render, reprompt=REPROMPT)
    [answer] = session.sample(TASK, max_tokens=4, seed=1)
    session.record_denial(answer, "41 42")
    service.faults.refused = {"save_weights_for_sampler": 400}
    with pytest.raises(ServiceError, match="a sampler with the trained weights"):
        session.train_sdpo()
    assert not session.denials and session.steps == 1
    service.faults.refused = {}
    session.refresh()
    assert session.policy.version == 1


def test_an_answer_from_before_a_refresh_is_refused(service: SpoiledService) -> None:
    session = SdpoSession(policy_of(service), render, reprompt=REPROMPT)
    old, denied = session.sample(TASK, max_tokens=4, count=2, seed=1)
    session.record_denial(denied, "41 42")
    session.train_sdpo()
    with pytest.raises(ValueError, match="the student was refreshed since it gave this answer"):
        session.record_denial(old, "41 42")
    assert session.record_denial(session.sample(TASK, max_tokens=4)[0], "41 42")


def test_the_hybrid_adds_an_advantage(service: SpoiledService) -> None:
    policy = policy_of(service)
    session = SdpoSession(policy, render, reprompt=REPROMPT)
    [answer] = session.sample(TASK, max_tokens=4, seed=1)
    session.record_denial(answer, "41 42", advantage=-0.5)
    session.train_sdpo(alpha_sdpo=0.0, learning_rate=0.01)
    [again] = policy.score([answer.prompt_ids + answer.ids])
    assert sum(one for one in again[-4:] if one is not None) < sum(answer.logprobs)


def test_the_teacher_takes_the_students_weights_every_so_many_refreshes(service: SpoiledService) -> None:
    policy = policy_of(service, teacher_every=3)
    first = policy.teacher
    seen = []
    for _ in range(6):
        policy.refresh()
        seen.append(policy.teacher is policy.sampling)
        assert policy.sampling is not first
    assert seen == [False, False, True, False, False, True]
    kept = TinkerPolicy(policy.training, teacher=first)
    kept.refresh()
    assert kept.teacher is first


@pytest.mark.recipes
def test_the_example_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    main = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "tinker_sdpo.py"))["main"]
    before, after = main([], steps=3)
    assert after < before
    assert f"after 3 steps (auto): {after:.3f} nats a token" in capsys.readouterr().out


# -- the reprompt ------------------------------------------------------------------------------------------------------


def test_the_three_slots() -> None:
    plain = Reprompt()
    assert plain.text("Task.", feedback="No.") == (
        "Task.\nThe following is feedback from your unsuccessful earlier attempt:\n\nNo.\n\n\n\n"
        "Correctly solve the original question.\n"
    )
    assert plain.text("Task.", solution="Do it.") == (
        "Task.\nCorrect solution:\n\nDo it.\n\n\n\nCorrectly solve the original question.\n"
    )
    assert "Do it." in plain.text("", feedback="No.", solution="Do it.")
    assert "out" not in plain.text("T", feedback="No.", environment_feedback="out")
    with_environment = replace(plain, include_environment_feedback=True)
    assert "No.\n\nEnvironment output:\nout" in with_environment.text("T", feedback="No.", environment_feedback="out")
    assert "attempt:\n\nout\n" in with_environment.text("T", environment_feedback="out")
    braces = plain.text("{feedback}{x}", feedback="{prompt} {", solution="{successful_previous_attempt}")
    assert braces.startswith("{feedback}{x}\nCorrect solution:\n\n{successful_previous_attempt}")
    assert "{prompt} {" in braces
    short = replace(plain, max_chars=200).text("x" * 11_000, feedback="Use the other file.", solution="y" * 20)
    assert len(short) == 200 and "Use the other file." in short and "y" * 20 in short and "xx" in short
    shorter = replace(plain, max_chars=170).text("x" * 11_000, feedback="Use the other file.", solution="y" * 20)
    assert len(shorter) == 170 and "Use the other file." in shorter and "x" not in shorter.replace("next", "")
    with pytest.raises(ValueError, match="the feedback alone makes a message of"):
        replace(plain, max_chars=100).text("x", feedback="Use the other file.")
    with pytest.raises(ValueError, match=r"template has no slot \{solution\}"):
        Reprompt("{prompt}{feedback}")


def test_the_whole_conversation_is_kept_and_the_last_user_message_is_the_prompt() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
        {"role": "tool", "content": "t"},
    ]
    made = Reprompt().messages(messages, feedback="no")
    assert made[:-1] == messages
    assert made[-1]["role"] == "user" and made[-1]["content"].startswith("two\nThe following is feedback")
    parts = [{"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]}]
    assert Reprompt().messages(parts, feedback="no")[-1]["content"].startswith("one two\nThe following")


def test_solutions_come_from_siblings_that_succeeded() -> None:
    group = [Attempt("lost", None), Attempt("own", 1.0), Attempt("other", 1.0), Attempt("half", 0.5)]
    assert Reprompt().solution_of(group, 1) == "other"
    assert Reprompt(dont_distill_on_self_success=False).solution_of(group, 1) == "own"
    assert Reprompt().solution_of(group, 0) == "own"
    assert Reprompt().solution_of(group[:2], 1) is None
    assert Reprompt(success_threshold=0.5).solution_of(group[3:], 5) == "half"
    thought = Reprompt(remove_thinking_from_demonstration=True).text("T", solution="<think>hm\n</think>\n\nDo it.")
    assert "hm" not in thought and "Correct solution:\n\nDo it." in thought
    assert "hm" in Reprompt().text("T", solution="<think>hm</think> Do it.")
    opened = Reprompt(remove_thinking_from_demonstration=True).text("T", solution="hm\n</think>\n\nDo it.")
    assert "hm" not in opened and "Do it." in opened


def test_the_teachers_prompt_goes_on_from_the_students() -> None:
    assert ending_of(render) == 1
    check_extension([3, 7, 2], [3, 7, 3, 8, 2], 1)
    check_extension([3, 7, 2], [3, 7, 2, 8, 2], 1)
    for teacher in ([3, 8, 7, 2], [3, 8, 3, 7, 2]):
        with pytest.raises(ValueError, match="leaves the student's after 1 of 3 tokens"):
            check_extension([3, 7, 2], teacher, 1)


def test_a_template_that_renders_history_in_another_way_is_refused(service: SpoiledService) -> None:
    def forgetful(messages: Sequence[Any]) -> list[int]:
        return render(messages[-1:])

    session = SdpoSession(policy_of(service), forgetful, reprompt=REPROMPT)
    [answer] = session.sample([*TASK, {"role": "user", "content": "11 12"}], max_tokens=4, seed=1)
    assert session.record_denial(answer, "41 42")  # the last message alone begins with the prompt
    session.reprompt = Reprompt("{feedback}{prompt}{solution}", feedback_template="{feedback_raw} ")
    with pytest.raises(ValueError, match="the chat template renders earlier messages in another way"):
        session.record_denial(answer, "41 42")


def test_the_vocabulary_of_the_words_above_fits_the_model() -> None:
    assert max(render([*TASK, {"role": "user", "content": REPROMPT.text("7 8 9", feedback="41 42 43")}])) < VOCABULARY
