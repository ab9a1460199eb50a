"""Cartridges: files, the HTTP contract, and on-policy distillation against a server that keeps the contract."""

from __future__ import annotations

import errno
import json
import pickle
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from toy_models import VOCABULARY, toy

from errata_protocol.errors import InvalidRequest, ServiceError
from errata_trainer.channels.sdpo import Divergence
from errata_trainer.recipes.cartridge import (
    Cartridge,
    CartridgeTrainer,
    Completion,
    TokasaurusClient,
    cartridge_model,
    cartridge_of,
    document_item,
    load_cartridge,
    loop,
    read_cartridge,
    remove_cartridge,
    write_cartridge,
)

from .example_modules import example

Tokasaurus: Any = example("tokasaurus_contract").Tokasaurus
TOKENS = 16


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(2, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


DOCUMENT = ids(48, 1)
PROMPTS = [ids(8, 10 + number) for number in range(4)]


def base() -> Any:
    return toy("qwen3").float()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cartridges"


@pytest.fixture
def server(directory: Path) -> Iterator[Tokasaurus]:
    directory.mkdir()
    with Tokasaurus(base(), directory) as made:
        yield made


@pytest.fixture
def client(server: Tokasaurus) -> Iterator[TokasaurusClient]:
    with TokasaurusClient(server.url) as made:
        yield made


def trainer(client: TokasaurusClient, directory: Path, **options: Any) -> CartridgeTrainer:
    model = cartridge_model(base(), DOCUMENT, tokens=TOKENS)
    return CartridgeTrainer(model, client, directory, DOCUMENT, **{"ignore_eos": True, **options})


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_cartridge_comes_back_bit_by_bit(directory: Path) -> None:
    model = cartridge_model(base(), DOCUMENT, tokens=TOKENS, frozen=2)
    with torch.no_grad():
        model.prompt_encoder["default"].trainable_embedding.normal_(generator=torch.Generator().manual_seed(5))
    written = cartridge_of(model)
    place = write_cartridge(directory, "one", written, model_name="tiny")
    assert sorted(one.name for one in place.iterdir()) == ["cartridge.pt", "config.yaml"]
    assert [one.name for one in directory.iterdir()] == ["one"]
    found = read_cartridge(directory, "one")
    assert found.frozen == 2 and found.tokens == TOKENS
    other = cartridge_model(base(), DOCUMENT[::-1], tokens=TOKENS, frozen=2)
    load_cartridge(other, found)
    for side in (found, cartridge_of(other)):
        for name in ("keys", "values"):
            assert all(torch.equal(a, b) for a, b in zip(getattr(side, name), getattr(written, name), strict=True))
    assert torch.equal(model.prompt_encoder["default"].weight, other.prompt_encoder["default"].weight)
    tensors = torch.load(place / "cartridge.pt", weights_only=True)
    assert [tuple(one.shape) for one in tensors["fixed_keys"]] == [(1, 1, 2, 8)] * 2
    assert [tuple(one.shape) for one in tensors["trainable_values"]] == [(1, 1, 14, 8)] * 2
    assert json.loads((place / "config.yaml").read_text())["kv_cache_initializer"] == {"max_tokens": 16}


@pytest.mark.parametrize("name", ["", "../x", "/tmp/verl_cartridge_latest.pt", "a/b", ".hidden", "a" * 101, "é", "a\n"])
def test_names_that_are_no_ids_are_refused(directory: Path, name: str) -> None:
    cartridge = cartridge_of(cartridge_model(base(), DOCUMENT, tokens=TOKENS))
    for use in (
        lambda: write_cartridge(directory, name, cartridge),
        lambda: read_cartridge(directory, name),
        lambda: remove_cartridge(directory, name),
    ):
        with pytest.raises(ValueError, match="is no id of a cartridge"):
            use()


def test_what_no_server_takes_is_refused(directory: Path) -> None:
    cartridge = cartridge_of(cartridge_model(base(), DOCUMENT, tokens=TOKENS))
    write_cartridge(directory, "one", cartridge)
    with pytest.raises(FileExistsError, match="a server reads an id once"):
        write_cartridge(directory, "one", cartridge)
    short = Cartridge(*(tuple(one[:, :, :10] for one in side) for side in (cartridge.keys, cartridge.values)))
    for wrong in (short, replace(cartridge, frozen=0)):
        with pytest.raises(ValueError, match="a server takes a multiple of 16, and at least one frozen token"):
            write_cartridge(directory, "two", wrong)
    with pytest.raises(FileNotFoundError):
        read_cartridge(directory, "two")
    (directory / "one" / "cartridge.pt").unlink()
    torch.save({"fixed_keys": []}, directory / "one" / "cartridge.pt")
    with pytest.raises(ValueError, match="holds no cartridge"):
        read_cartridge(directory, "one")
    remove_cartridge(directory, "one")
    assert list(directory.iterdir()) == []
    with pytest.raises(ValueError, match="the cartridge's keys are"):
        load_cartridge(cartridge_model(base(), DOCUMENT, tokens=32), cartridge)
    with pytest.raises(ValueError, match="1 frozen tokens, the model 2"):
        load_cartridge(cartridge_model(base(), DOCUMENT, tokens=16, frozen=2), cartridge)
    for options, words in (
        ({"tokens": 20}, "multiple of 16"),
        ({"tokens": 64}, "fewer than the 64 of the cartridge"),
        ({"tokens": 16, "frozen": 0}, "at least 1"),
        ({"tokens": 16, "frozen": 16}, "less than the 16"),
    ):
        with pytest.raises(ValueError, match=words):
            cartridge_model(base(), DOCUMENT, **options)


def test_files_of_the_cartridges_project_are_read(directory: Path) -> None:
    """It saves the lists of its module, which are of torch's class."""
    made = cartridge_of(cartridge_model(base(), DOCUMENT, tokens=TOKENS))
    place = write_cartridge(directory, "one", made)
    tensors = torch.load(place / "cartridge.pt", weights_only=True)
    torch.save({name: torch.nn.ParameterList(one) for name, one in tensors.items()}, place / "cartridge.pt")
    found = read_cartridge(directory, "one")
    assert all(torch.equal(a, b) and not a.requires_grad for a, b in zip(found.keys, made.keys, strict=True))


@pytest.mark.parametrize(
    "raw", [b"", b"garbage", pickle.dumps({"fixed_keys": print}, 2)], ids=["empty", "garbage", "a function"]
)
def test_files_that_hold_no_cartridge(directory: Path, raw: bytes) -> None:
    (directory / "one").mkdir(parents=True)
    (directory / "one" / "cartridge.pt").write_bytes(raw)
    with pytest.raises(ValueError, match=r"one/cartridge\.pt holds no cartridge: "):
        read_cartridge(directory, "one")


def test_a_failed_write_leaves_nothing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = cartridge_of(cartridge_model(base(), DOCUMENT, tokens=TOKENS))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def first(*_: Any) -> None:
        (directory / "one" / "of another process").mkdir(parents=True)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        write_cartridge(directory, "one", made)
    assert list(directory.iterdir()) == []
    monkeypatch.setattr(torch, "save", first)
    with pytest.raises(FileExistsError, match="another process wrote it"):
        write_cartridge(directory, "one", made)
    assert [one.name for one in directory.iterdir()] == ["one"]


@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_a_model_that_would_forget_its_cartridge_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="a sliding window of 4 tokens, and would forget a cartridge of 16"):
        cartridge_model(toy(kind).float(), DOCUMENT, tokens=TOKENS)


# -- the contract ------------------------------------------------------------------------------------------------------


def test_what_a_server_says(client: TokasaurusClient, server: Tokasaurus) -> None:
    client.ping()
    assert client.models() == ["tiny"]
    two = client.complete([5, 9, 17], max_tokens=3, temperature=0, count=2, ignore_eos=True)
    assert len(two) == 2 and two[0] == two[1] and two[0].finish == "length"
    assert len(two[0].ids) == len(two[0].logprobs) == 3
    with torch.no_grad():
        logits = server.model(torch.tensor([[5, 9, 17, *two[0].ids]])).logits[0, 2:-1].log_softmax(-1)
    expected = logits.gather(-1, torch.tensor(two[0].ids)[:, None])[:, 0].tolist()
    assert two[0].logprobs == pytest.approx(expected, abs=1e-5)


def test_an_end_token_ends_a_completion(client: TokasaurusClient, server: Tokasaurus) -> None:
    [first] = client.complete([5, 9], max_tokens=1, temperature=0, ignore_eos=True)
    server.model.config.eos_token_id = first.ids[0]
    [ended] = client.complete([5, 9], max_tokens=8, temperature=0)
    assert ended.finish == "stop" and len(ended.ids) == 1


@pytest.mark.parametrize(
    ("changed", "status", "words"),
    [
        ({"top_k": 5}, 422, "extra_forbidden"),
        ({"top_p": 0.9}, 400, "top_p not supported"),
        ({"logprobs": 5}, 400, "logprobs=5 but engine was configured with max_topk_logprobs=None"),
        ({"echo": True}, 400, "echo not supported"),
        ({"max_tokens": 0}, 400, "max tokens must be greater than 0"),
        ({"model": None}, 422, "model"),
        ({"prompt": [[5, 9], [17]]}, 400, "Invalid type for prompt"),
        ({"frequency_penalty": 0.5}, 400, "not supported"),
        (
            {"cartridges": [{"id": "/tmp/verl_cartridge_latest.pt", "source": "local", "force_redownload": True}]},
            400,
            "FileNotFoundError: Cartridge config not found",
        ),
    ],
)
def test_the_contract_refuses_what_tokasaurus_refuses(
    server: Tokasaurus, changed: dict[str, Any], status: int, words: str
) -> None:
    asked = {"model": "default", "prompt": [5, 9, 17], "max_tokens": 3, **changed}
    answer = httpx.post(f"{server.url}/custom/cartridge/completions", json=asked)
    assert answer.status_code == status
    assert words in json.dumps(answer.json()["detail"])


def test_refusals_are_the_callers_and_failures_the_services(client: TokasaurusClient, server: Tokasaurus) -> None:
    with pytest.raises(InvalidRequest, match="Tokasaurus refuses the request: max tokens must be greater than 0"):
        client.complete([5], max_tokens=0)
    with pytest.raises(InvalidRequest, match=r"Tokasaurus refuses the request: .*valid integer"):
        client.complete([5], max_tokens=1, count="x")  # type: ignore[arg-type]
    with pytest.raises(
        InvalidRequest, match=r"does not know the cartridge.*directory that the server was started with"
    ):
        client.complete([5], max_tokens=1, cartridge="unknown")
    with pytest.raises(ValueError, match="is no id of a cartridge"):
        client.complete([5], max_tokens=1, cartridge="/tmp/verl_cartridge_latest.pt")
    server.status = 500
    with pytest.raises(ServiceError, match="Tokasaurus failed with status 500: failed by the test"):
        client.complete([5], max_tokens=1)


def test_a_server_that_is_not_there_or_another(client: TokasaurusClient) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        nobody = TokasaurusClient(f"http://127.0.0.1:{taken.getsockname()[1]}")
        with nobody, pytest.raises(ServiceError, match="no answer from Tokasaurus at http://127"):
            nobody.ping()
    with socket.socket() as silent, pytest.raises(ServiceError, match=r"no answer from Tokasaurus.*Timeout"):
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with TokasaurusClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2) as hung:
            hung.ping()
    with pytest.raises(ValueError, match="timeout_s is 0"):
        TokasaurusClient("http://x", timeout_s=0)


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"system_fingerprint": "null", "choices": []},
        {
            "system_fingerprint": json.dumps({"completion_ids": [[-1]], "packed_chosen_logprobs": ["AACAvw=="]}),
            "choices": [{"finish_reason": "stop"}],
        },
        {
            "system_fingerprint": '{"completion_ids": [[1e999]], "packed_chosen_logprobs": ["AACAvw=="]}',
            "choices": [{"finish_reason": "stop"}],
        },
        {"system_fingerprint": json.dumps({"completion_ids": [[1]], "packed_chosen_logprobs": None}), "choices": []},
        {
            "system_fingerprint": json.dumps({"completion_ids": [[1, 2]], "packed_chosen_logprobs": ["AACAvw=="]}),
            "choices": [{"finish_reason": "stop"}],
        },
        {
            "system_fingerprint": json.dumps({"completion_ids": [[1]], "packed_chosen_logprobs": ["no base64"]}),
            "choices": [{"finish_reason": "stop"}],
        },
    ],
)
def test_answers_that_are_no_completions_are_the_services(answer: dict[str, Any]) -> None:
    client = TokasaurusClient("http://server")
    client._http = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, json=answer)))
    with pytest.raises(ServiceError, match=r"cannot be read|tokens without log-probabilities"):
        client.complete([5], max_tokens=1)
    other = TokasaurusClient("http://server")
    other._http = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text="<html>")))
    with pytest.raises(ServiceError, match="is no Tokasaurus server"):
        other.ping()


# -- the loop ----------------------------------------------------------------------------------------------------------


def test_a_cartridge_that_is_the_whole_document_is_the_document(client: TokasaurusClient, directory: Path) -> None:
    document = DOCUMENT[:TOKENS]
    model = cartridge_model(base(), document, tokens=TOKENS)
    made = CartridgeTrainer(model, client, directory, document, ignore_eos=True)
    rollouts = made.rollouts(PROMPTS, max_tokens=6)
    assert made.divergence_of(rollouts) == pytest.approx(0, abs=1e-6)
    for rollout in rollouts:
        row = [*document, *rollout.prompt_ids, *rollout.completion_ids]
        with torch.no_grad():
            logits = model.get_base_model()(torch.tensor([row])).logits[0, -7:-1].log_softmax(-1)
        expected = logits.gather(-1, torch.tensor(rollout.completion_ids)[:, None])[:, 0].tolist()
        assert rollout.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.recipes
def test_the_divergence_falls_and_nothing_but_the_cartridge_moves(
    client: TokasaurusClient, server: Tokasaurus, directory: Path
) -> None:
    made = trainer(client, directory, learning_rate=0.05)
    weights = {name: one.detach().clone() for name, one in made.model.get_base_model().named_parameters()}
    first = cartridge_of(made.model)
    run = made.cartridge_id.removesuffix("-000000")
    assert re.fullmatch("errata-[0-9a-f]{8}", run)
    fixed = made.rollouts(PROMPTS, max_tokens=8, count=2)
    before = made.divergence_of(fixed)
    for step in range(60):
        metrics = made.step(PROMPTS, max_tokens=8, count=2)
        assert metrics["cartridge/apart"] < 1e-3  # of the server's log-probabilities and the trainer's
        assert made.cartridge_id == f"{run}-{step + 1:06d}"
    assert metrics["cartridge/document_tokens_saved"] == 8 * (48 - 16)
    assert made.divergence_of(fixed) <= before / 2
    assert made.divergence_of(made.rollouts(PROMPTS, max_tokens=8, count=2)) <= before / 2
    last = cartridge_of(made.model)
    for name in ("keys", "values"):
        for was, now in zip(getattr(first, name), getattr(last, name), strict=True):
            assert torch.equal(was[:, :, :1], now[:, :, :1]) and not torch.equal(was[:, :, 1:], now[:, :, 1:])
    assert all(torch.equal(one, weights[name]) for name, one in made.model.get_base_model().named_parameters())
    used = [asked.cartridges[0].id for asked in server.asked if asked.cartridges]
    assert list(dict.fromkeys(used)) == [f"{run}-{step:06d}" for step in range(61)]
    assert sorted(one.name for one in directory.iterdir()) == [f"{run}-{step:06d}" for step in (58, 59, 60)]


def test_a_step_is_channel_2_with_the_document_as_its_hint(client: TokasaurusClient, directory: Path) -> None:
    made = trainer(client, directory, divergence=Divergence(0.3, token_clip=None))
    [rollout] = made.rollouts(PROMPTS[:1], max_tokens=5)
    item = document_item(DOCUMENT, rollout)
    row = rollout.prompt_ids + rollout.completion_ids
    assert item.teacher_ids == (*DOCUMENT, *row) and item.target_ids == rollout.completion_ids
    student = made.model(torch.tensor([row])).logits[0][list(item.student_positions)]
    with torch.no_grad():
        teacher = made.model.get_base_model()(torch.tensor([item.teacher_ids])).logits[0][list(item.teacher_positions)]
    expected = Divergence(0.3, token_clip=None)(student, teacher).mean()
    expected.backward()
    wanted = made.parameters[0].grad
    assert wanted is not None
    gradient = wanted.clone()
    made.rollouts = lambda *_, **__: [rollout]  # type: ignore[method-assign]
    metrics = made.step(PROMPTS[:1], max_tokens=5)
    assert metrics["cartridge/kl"] == pytest.approx(float(expected.detach()), rel=1e-4)
    torch.testing.assert_close(made.parameters[0].grad, gradient, rtol=1e-3, atol=1e-6)


def test_a_server_without_the_cartridge_is_refused(
    client: TokasaurusClient, server: Tokasaurus, directory: Path
) -> None:
    made = trainer(client, directory)
    server.uses_cartridges = False
    before = cartridge_of(made.model)
    with pytest.raises(ServiceError, match=r"nats apart from the trainer's.*does not use this cartridge.*Nothing was"):
        made.step(PROMPTS, max_tokens=6)
    assert made.steps == 0 and all(
        torch.equal(a, b) for a, b in zip(before.keys, cartridge_of(made.model).keys, strict=True)
    )


def test_a_stale_cartridge_is_refused(client: TokasaurusClient, server: Tokasaurus, directory: Path) -> None:
    """What the design's author did: the file is overwritten, and the id stays. The server keeps what it read."""
    made = trainer(client, directory)
    first = made.cartridge_id
    made.step(PROMPTS, max_tokens=6)
    server._loaded[made.cartridge_id] = server._loaded[first]
    with pytest.raises(ServiceError, match="an older one under the same id"):
        made.step(PROMPTS, max_tokens=6)


def test_overwriting_a_known_id_changes_nothing(client: TokasaurusClient, directory: Path) -> None:
    cartridge = cartridge_of(cartridge_model(base(), DOCUMENT, tokens=TOKENS))
    write_cartridge(directory, "latest", cartridge)
    asked = {"max_tokens": 4, "temperature": 0.0, "cartridge": "latest", "ignore_eos": True}
    first = client.complete(PROMPTS[0], **asked)
    remove_cartridge(directory, "latest")
    write_cartridge(directory, "latest", replace(cartridge, values=tuple(one * 0 for one in cartridge.values)))
    assert client.complete(PROMPTS[0], **asked) == first
    write_cartridge(directory, "new", read_cartridge(directory, "latest"))
    assert client.complete(PROMPTS[0], **{**asked, "cartridge": "new"}) != first


def test_steps_between_checks_do_not_compare(client: TokasaurusClient, directory: Path) -> None:
    made = trainer(client, directory, check_every=2)
    compared = ["cartridge/apart" in made.step(PROMPTS[:1], max_tokens=2) for _ in range(4)]
    assert compared == [True, False, True, False]


@pytest.mark.recipes
def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    before, after = example("cartridge_distill").main([], steps=10)
    assert after < before
    assert "step 10: " in capsys.readouterr().out


def test_a_server_that_is_killed_in_mid_batch_trains_nothing(
    client: TokasaurusClient, server: Tokasaurus, directory: Path
) -> None:
    made = trainer(client, directory)
    before = cartridge_of(made.model)
    server.answers = 2
    with pytest.raises(ServiceError, match="Tokasaurus failed with status 503"):
        made.step(PROMPTS, max_tokens=4)
    assert made.steps == 0 and torch.equal(before.keys[0], cartridge_of(made.model).keys[0])
    server.answers = None
    assert made.step(PROMPTS, max_tokens=4)["cartridge/tokens"] == 16


def test_a_cartridge_that_could_not_be_written_is_written_by_the_next_step(
    client: TokasaurusClient, server: Tokasaurus, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = trainer(client, directory, check_every=10)
    first, run = made.cartridge_id, made.cartridge_id.removesuffix("-000000")

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(loop, "write_cartridge", full)
        made.step(PROMPTS, max_tokens=4)
    assert (made.steps, made.cartridge_id) == (1, first)
    metrics = made.step(PROMPTS, max_tokens=4)
    assert metrics["cartridge/apart"] < 1e-4  # compared, though it was not this step's turn
    assert server.asked[-1].cartridges[0].id == f"{run}-000001"
    assert (made.steps, made.cartridge_id) == (2, f"{run}-000002")


def test_a_loss_that_is_not_finite_trains_nothing(client: TokasaurusClient, directory: Path) -> None:
    made = trainer(client, directory, check_every=2)
    made.step(PROMPTS, max_tokens=4)
    kept = made.rollouts(PROMPTS, max_tokens=4)
    made.rollouts = lambda *_, **__: kept  # type: ignore[method-assign]
    with torch.no_grad():
        made.parameters[0][0, 0] = float("inf")
    before = made.parameters[0].detach().clone()
    with pytest.raises(ValueError, match=r"the loss is nan, the norm of its gradient nan: no step was made"):
        made.step(PROMPTS, max_tokens=4)
    assert made.steps == 1 and torch.equal(before, made.parameters[0])


def test_tokens_of_another_model_are_the_services(client: TokasaurusClient, directory: Path) -> None:
    made = trainer(client, directory)
    client.complete = lambda *_, **__: [Completion((5, VOCABULARY), (-1.0, -1.0), "stop")]  # type: ignore[method-assign]
    with pytest.raises(ServiceError, match="sampled token 100, and the model has 100: it has another model"):
        made.step(PROMPTS, max_tokens=4)


def test_rows_that_the_model_does_not_see_are_refused(client: TokasaurusClient, directory: Path) -> None:
    model = cartridge_model(toy("qwen3", max_position_embeddings=60).float(), DOCUMENT, tokens=TOKENS)
    with pytest.raises(ValueError, match=r"the teacher would read 61 tokens .*the model sees 60"):
        CartridgeTrainer(model, client, directory, ids(61, 1))
    made = CartridgeTrainer(model, client, directory, DOCUMENT, ignore_eos=True)
    with pytest.raises(ValueError, match="the teacher would read 61 tokens"):
        made.step(PROMPTS, max_tokens=5)
    assert made.step(PROMPTS, max_tokens=4)["cartridge/tokens"] == 16
    model = cartridge_model(toy("mistral", sliding_window=40).float(), DOCUMENT, tokens=TOKENS)
    with pytest.raises(ValueError, match="the model sees 40"):
        CartridgeTrainer(model, client, directory, DOCUMENT)


def test_gradient_checkpointing_is_refused(client: TokasaurusClient, directory: Path) -> None:
    model = cartridge_model(base(), DOCUMENT, tokens=TOKENS)
    model.get_base_model().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="switch it off in the base model"):
        CartridgeTrainer(model, client, directory, DOCUMENT)


def test_wrong_options_are_refused(client: TokasaurusClient, directory: Path) -> None:
    model = cartridge_model(base(), DOCUMENT, tokens=TOKENS)
    for options, words in (
        ({"check_every": 0}, "check_every is 0"),
        ({"tolerance": 0}, "tolerance is 0"),
        ({"name": "a/b"}, "is no id of a cartridge"),
        ({"name": "a" * 90}, "is no id of a cartridge"),
    ):
        with pytest.raises(ValueError, match=words):
            CartridgeTrainer(model, client, directory, DOCUMENT, **options)
    with pytest.raises(ValueError, match="the document is empty"):
        CartridgeTrainer(model, client, directory, [])
    made = CartridgeTrainer(model, client, directory, DOCUMENT)
    with pytest.raises(ValueError, match="there are no prompts"):
        made.step([], max_tokens=1)
