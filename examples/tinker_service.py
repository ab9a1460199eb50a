"""A local service that speaks the wire of the Tinker SDK 0.38, protobuf included, around one small torch model.

    with TinkerService(model) as service:
        policy = TinkerPolicy.connect(service.url, "tiny", api_key="tml-local")

It is for trying the recipe without an account. It trains whole weights where Tinker trains an adapter, keeps all that
it answered, and makes one request after the other.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from tinker.proto import tinker_public_pb2 as pb

NUMPY: dict[int, Any] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
INPUTS = {
    "cross_entropy": {"target_tokens", "weights"},
    "importance_sampling": {"target_tokens", "logprobs", "advantages"},
    "ppo": {"target_tokens", "logprobs", "advantages"},
}
MASKED = -99999.0
"""Log-probability that stands for none in a list of likeliest tokens."""


class TinkerService:
    """The service, from ``with`` to its end.

    Args:
        model: The model. It is copied for each training client.

    Attributes:
        url: Base URL.
        trained: Models of the training clients, in order.
        calls: Number of requests, by the last part of their path.
    """

    def __init__(self, model: Any) -> None:
        self.base = model.float().eval()
        self.trained: list[Any] = []
        self.calls: Counter[str] = Counter()
        self._models: dict[str, tuple[Any, torch.optim.Optimizer]] = {}
        self._samplers: dict[str, Any] = {}
        self._done: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self._server = uvicorn.Server(
            uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        )
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the Tinker service did not start")
            threading.Event().wait(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def _app(self) -> FastAPI:
        app = FastAPI()
        answers: dict[str, Callable[[Any], Any]] = {
            "client/config": lambda _: {"pjwt_auth_enabled": False, "use_pyqwest_transport": False},
            "create_session": lambda _: {"session_id": "session-1"},
            "session_heartbeat": lambda _: {"type": "session_heartbeat"},
            "telemetry": lambda _: {"status": "accepted"},
            "create_model": self._create_model,
            "get_info": self._info,
            "create_sampling_session": self._create_sampler,
            "save_weights_for_sampler": self._save,
            "optim_step": self._optim_step,
            "forward_backward": self._forward_backward,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }

        @app.middleware("http")
        async def counted(request: Request, call_next: Any) -> Any:
            return await self.passed(request.url.path.removeprefix("/api/v1/"), request, call_next)

        for name, answer in answers.items():
            app.post(f"/api/v1/{name}")(_handler(answer))
        app.post("/api/v1/sessions/{name}/finish")(lambda name: {})
        app.get("/api/v1/healthz")(lambda: {"status": "ok"})
        app.get("/api/v1/get_server_capabilities")(lambda: {"supported_models": [{"model_name": "tiny"}]})
        app.get("/api/v1/samplers/{name}")(lambda name: {"sampler_id": name, "base_model": "tiny"})
        return app

    async def passed(self, name: str, request: Request, call_next: Any) -> Any:
        """Return the answer to a request.

        Args:
            name: Last part of its path.
            request: Request of the SDK.
            call_next: Function that answers it.
        """
        self.calls[name] += 1
        return await call_next(request)

    def scored(self, tokens: Sequence[int], logprobs: list[float]) -> list[float]:
        """Return the log-probabilities of a prompt as they are sent.

        Args:
            tokens: Tokens of the prompt.
            logprobs: Log-probability of each of them, NaN for the first.
        """
        return logprobs

    def listed(self, k: int) -> int:
        """Return how many likeliest tokens are sent where ``k`` are asked for; 0 for none."""
        return k

    def moved_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the distributions ``[N, V]`` of a prompt's tokens but the first, of which the likeliest are sent."""
        return rows

    def refused(self, targets: torch.Tensor) -> str | None:
        """Return why targets ``[T]`` or ``[T, K]`` are not trained on; None if they are."""
        return None

    def _future(self, value: Any, **more: Any) -> dict[str, Any]:
        name = f"request-{next(self._numbers)}"
        self._done[name] = value
        return {"request_id": name, **more}

    def _retrieve(self, asked: dict[str, Any]) -> Any:
        value = self._done[asked["request_id"]]
        return Response(value, media_type="application/x-protobuf") if isinstance(value, bytes) else value

    def _create_model(self, _: Any) -> Any:
        model = copy.deepcopy(self.base)
        self.trained.append(model)
        name = f"model-{len(self.trained)}"
        self._models[name] = (model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
        return self._future({"model_id": name, "type": "create_model"})

    def _info(self, asked: dict[str, Any]) -> Any:
        data = {"arch": "qwen3", "model_name": "tiny", "tokenizer_id": "tiny"}
        return {
            "model_data": data,
            "model_id": asked["model_id"],
            "is_lora": True,
            "lora_rank": 8,
            "model_name": "tiny",
        }

    def _create_sampler(self, asked: dict[str, Any]) -> Any:
        name = f"sampler-{next(self._numbers)}"
        path = asked.get("model_path")
        self._samplers[name] = self._samplers[path] if path else self.base
        return {"sampling_session_id": name}

    def _save(self, asked: dict[str, Any]) -> Any:
        kept = copy.deepcopy(self._models[asked["model_id"]][0]).eval()
        if asked.get("path"):
            path = f"tinker://{asked['model_id']}/sampler_weights/{asked['path']}"
            self._samplers[path] = kept
            return self._future({"path": path, "type": "save_weights_for_sampler"})
        name = f"sampler-{next(self._numbers)}"
        self._samplers[name] = kept
        return self._future({"sampling_session_id": name, "type": "save_weights_for_sampler"})

    def _optim_step(self, asked: dict[str, Any]) -> Any:
        model, optimizer = self._models[asked["model_id"]]
        given = asked["adam_params"]
        for group in optimizer.param_groups:
            group.update(
                lr=given["learning_rate"],
                betas=(given["beta1"], given["beta2"]),
                eps=given["eps"],
                weight_decay=given["weight_decay"],
            )
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), given["grad_clip_norm"] or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return self._future({"metrics": {"grad_norm": float(norm)}, "type": "optim_step"})

    def _forward_backward(self, body: bytes) -> Any:
        asked = pb.ForwardBackwardRequest()
        asked.ParseFromString(body)
        model, _ = self._models[asked.model_id]
        total, scored, losses = torch.zeros(()), [], []
        with torch.set_grad_enabled(not asked.forward_only):
            for datum in asked.data:
                given = {name: _tensor(one) for name, one in datum.loss_fn_inputs.items()}
                if unknown := set(given) - INPUTS[asked.loss_fn]:
                    return Response(json.dumps({"detail": f"unknown loss_fn_inputs {sorted(unknown)}"}), 400)
                targets = given["target_tokens"]
                if (why := self.refused(targets)) is not None:
                    return Response(json.dumps({"detail": why}), 400)
                found = _logprobs(model, _tokens(datum.model_input))
                found = found.gather(-1, targets) if targets.ndim == 2 else found.gather(-1, targets[:, None])[:, 0]
                loss = _loss(asked.loss_fn, found, given)
                total = total + loss.sum()
                scored.append(found.detach())
                losses.append(loss.detach())
            if not asked.forward_only:
                total.backward()
        answer = pb.ForwardBackwardOutput(loss_fn_output_type="TorchLossReturn")
        answer.metrics["loss:sum"] = float(total.detach())
        record = answer.loss_fn_outputs.add()
        record.num_datums = len(scored)
        for name, rows in (("logprobs", scored), ("elementwise_loss", losses)):
            parts = [one.numpy().astype(np.float32).tobytes() for one in rows]
            batched = record.fields[name]
            batched.dtype = pb.DTYPE_FLOAT32
            batched.data = b"".join(parts)
            batched.offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64).tobytes()
            if rows[0].ndim == 2:
                batched.trailing_shape.extend([rows[0].shape[1]])
        return self._future(answer.SerializeToString())

    def _sample(self, asked: dict[str, Any]) -> Any:
        model = self._samplers.get(asked.get("sampling_session_id"), self.base)
        prompt = [token for chunk in asked["prompt"]["chunks"] for token in chunk["tokens"]]
        settings, answer = asked["sampling_params"], pb.SampleResponse()
        numbers = torch.Generator().manual_seed(
            int(next(self._numbers) if settings.get("seed") is None else settings["seed"])
        )
        with torch.no_grad():
            for _ in range(asked["num_samples"]):
                answer.sequences.append(_sequence(model, prompt, settings, numbers))
            full = _logprobs(model, prompt)[:-1]  # row i is the distribution of token i + 1
            own = [np.nan, *full.gather(-1, torch.tensor(prompt[1:], dtype=torch.int64)[:, None])[:, 0].tolist()]
        if asked.get("prompt_logprobs"):
            answer.prompt_logprobs = np.array(self.scored(prompt, own), np.float32).tobytes()
        if k := self.listed(asked.get("topk_prompt_logprobs") or 0):
            values, ids = self.moved_rows(full).topk(k, -1)
            first_ids, first = np.zeros((1, k), np.int32), np.full((1, k), MASKED, np.float32)
            answer.topk_prompt_logprobs.CopyFrom(
                pb.TopkLogprobs(
                    token_ids=first_ids.tobytes() + ids.numpy().astype(np.int32).tobytes(),
                    logprobs=first.tobytes() + values.numpy().astype(np.float32).tobytes(),
                    k=k,
                    length=len(prompt),
                )
            )
        names = [f"sequence-{next(self._numbers)}" for _ in range(asked["num_samples"])]
        return self._future(answer.SerializeToString(), sample_sequence_ids=names)


def _handler(answer: Callable[[Any], Any]) -> Any:
    async def handler(request: Request) -> Any:
        body = await request.body()
        if "protobuf" in request.headers.get("content-type", ""):
            return answer(body)
        return answer(await request.json() if body else {})

    return handler


def _tensor(sent: Any) -> torch.Tensor:
    if sent.WhichOneof("encoding") == "dense":
        found = torch.from_numpy(np.frombuffer(sent.dense, NUMPY[sent.dtype]).copy())
    else:
        rows = sent.sparse_csr
        found = torch.sparse_csr_tensor(
            torch.from_numpy(np.frombuffer(rows.crow_indices, np.int64).copy()),
            torch.from_numpy(np.frombuffer(rows.col_indices, np.int64).copy()),
            torch.from_numpy(np.frombuffer(rows.values, NUMPY[sent.dtype]).copy()),
            list(sent.shape),
        ).to_dense()
    return found.reshape(list(sent.shape)) if len(sent.shape) else found


def _tokens(chunks: Sequence[Any]) -> list[int]:
    return [int(one) for chunk in chunks for one in np.frombuffer(chunk.encoded_text.tokens, np.int32)]


def _logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)


def _loss(name: str, logprobs: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    if name == "cross_entropy":
        return -(logprobs * given.get("weights", torch.ones_like(logprobs)))
    ratio, advantages = (logprobs - given["logprobs"]).exp(), given["advantages"]
    if name == "ppo":
        return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -ratio * advantages


def _sequence(model: Any, prompt: list[int], settings: dict[str, Any], numbers: torch.Generator) -> Any:
    tokens: list[int] = []
    logprobs: list[float] = []
    stop = settings.get("stop") or []
    for _ in range(settings.get("max_tokens") or 16):
        found = _logprobs(model, prompt + tokens)[-1]
        chances = (found / max(settings["temperature"], 1e-6)).softmax(-1)
        tokens.append(int(torch.multinomial(chances, 1, generator=numbers)))
        logprobs.append(float(found[tokens[-1]]))
        if tokens[-1] in stop:
            break
    reason = pb.STOP_REASON_STOP if tokens[-1] in stop else pb.STOP_REASON_LENGTH
    return pb.SampledSequence(
        stop_reason=reason,
        tokens=np.array(tokens, np.int32).tobytes(),
        logprobs=np.array(logprobs, np.float32).tobytes(),
    )
