"""Tokasaurus' HTTP contract of the branch ``geoff/cartridges`` around a small model: requests, refusals, and cartridges
that are read once. Status and words of its refusals are those of Tokasaurus' own HTTP layer.

    with Tokasaurus(model, directory) as server:
        client = TokasaurusClient(server.url)

It is for trying the recipe on a CPU. It samples one completion after the other.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
import uvicorn
import yaml
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, ConfigDict
from transformers import DynamicCache

PAGE = 16


class AskedCartridge(BaseModel):
    id: str
    source: Literal["wandb", "local", "huggingface"] = "wandb"
    force_redownload: bool = False


class Asked(BaseModel):
    model_config = ConfigDict(extra="forbid")

    model: str
    prompt: list[int] | list[list[int]] | str | list[str]
    best_of: int | None = None
    echo: bool | None = False
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    max_tokens: int | None = 16
    n: int = 1
    presence_penalty: float | None = 0.0
    seed: int | None = None
    stop: str | list[str] | None = []
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    suffix: str | None = None
    temperature: float | None = 1.0
    top_p: float | None = 1.0
    user: str | None = None
    metadata: dict[str, Any] | None = None
    logprobs_in_fingerprint: bool = False
    ignore_eos: bool = False
    cartridges: list[AskedCartridge] | None = None


class Tokasaurus:
    """The server, from ``with`` to its end.

    Args:
        model: The model.
        directory: Directory of the cartridges.

    Attributes:
        url: Base URL.
        asked: Requests for completions that were taken, in order.
        uses_cartridges: Whether it uses the cartridges that requests name.
        status: Status of all answers to completions; None answers.
        answers: Number of completions that are still answered before status 503; None for all.
    """

    def __init__(self, model: Any, directory: Path) -> None:
        self.model, self.directory = model.eval(), Path(directory)
        self.asked: list[Asked] = []
        self.uses_cartridges = True
        self.status: int | None = None
        self.answers: int | None = None
        self.url = ""
        self._loaded: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._numbers = torch.Generator().manual_seed(0)
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            threading.Event().wait(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)

    def _app(self) -> FastAPI:
        app = FastAPI()
        app.get("/ping")(lambda: {"message": "pong"})
        listed = {"id": "tiny", "object": "model", "owned_by": "tokasaurus", "created": int(time.time())}
        app.get("/v1/models")(lambda: {"object": "list", "data": [listed]})

        @app.post("/custom/cartridge/completions")
        async def completions(asked: Asked) -> dict[str, Any]:
            if self.status is not None:
                raise HTTPException(self.status, "failed by the test")
            if self.answers is not None:
                self.answers -= 1
                if self.answers < 0:
                    raise HTTPException(503, "failed by the test")
            return self._completions(asked)

        return app

    def _completions(self, asked: Asked) -> dict[str, Any]:
        for refused, why in (
            (asked.top_p not in (None, 1.0), "top_p not supported"),
            (asked.echo, "echo not supported"),
            (asked.frequency_penalty or asked.presence_penalty or asked.logit_bias, "penalties not supported"),
            (asked.max_tokens is not None and asked.max_tokens <= 0, "max tokens must be greater than 0"),
            (
                asked.logprobs,
                f"logprobs={asked.logprobs} but engine was configured with max_topk_logprobs=None",
            ),
            (
                not (isinstance(asked.prompt, list) and all(isinstance(one, int) for one in asked.prompt)),
                "Invalid type for prompt",
            ),
        ):
            if refused:
                raise HTTPException(400, why)
        try:
            prefix = [self._read(one.id) for one in asked.cartridges or []]
        except Exception as error:
            raise HTTPException(400, f"{type(error).__name__}: {error}") from error
        self.asked.append(asked)
        made = [self._sampled(asked, prefix if self.uses_cartridges else []) for _ in range(asked.n)]
        fingerprint = {
            "completion_ids": [ids for ids, _, _ in made],
            "packed_chosen_logprobs": [
                base64.b64encode(np.array(logprobs, np.float32).tobytes()).decode() for _, logprobs, _ in made
            ]
            if asked.logprobs_in_fingerprint
            else None,
            "packed_topk_indices": None,
            "packed_topk_logprobs": None,
        }
        return {
            "id": "completion",
            "object": "text_completion",
            "model": asked.model,
            "created": int(time.time()),
            "system_fingerprint": json.dumps(fingerprint),
            "choices": [
                {"index": index, "text": "", "logprobs": None, "finish_reason": finish}
                for index, (_, _, finish) in enumerate(made)
            ],
        }

    def _read(self, cartridge_id: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return a cartridge's keys and values; a known id is never read again."""
        if cartridge_id not in self._loaded:
            place = self.directory / re.sub(r"[^\w\-]", "_", re.sub(r"[/\\]", "-", cartridge_id))
            if not (place / "config.yaml").exists():
                raise FileNotFoundError(f"Cartridge config not found: {place / 'config.yaml'}")
            size = yaml.safe_load((place / "config.yaml").read_text())["kv_cache_initializer"]["max_tokens"]
            found = torch.load(place / "cartridge.pt", weights_only=True)
            sides = [
                [torch.cat(pair, 2) for pair in zip(found[f"fixed_{name}"], found[f"trainable_{name}"], strict=True)]
                for name in ("keys", "values")
            ]
            whole = sides[0][0].shape[2] // PAGE
            if whole != -(-size // PAGE):
                raise ValueError("Block indices length doesn't match expected blocks")
            cut = whole * PAGE
            self._loaded[cartridge_id] = [(k[:, :, :cut], v[:, :, :cut]) for k, v in zip(*sides, strict=True)]
        return self._loaded[cartridge_id]

    @torch.no_grad()
    def _sampled(self, asked: Asked, prefix: list[Any]) -> tuple[list[int], list[float], str]:
        past = DynamicCache()
        for layer in range(self.model.config.num_hidden_layers if prefix else 0):
            kept = [torch.cat([one[layer][side] for one in prefix], 2).clone() for side in (0, 1)]
            keys, values = (one.to(self.model.device, self.model.dtype) for one in kept)
            past.update(keys, values, layer)
        position = past.get_seq_length()
        given = torch.tensor([asked.prompt])
        ids: list[int] = []
        logprobs: list[float] = []
        while True:
            places = torch.arange(position, position + given.shape[1])[None]
            logits = self.model(input_ids=given, past_key_values=past, position_ids=places, use_cache=True).logits
            position += given.shape[1]
            found = logits[0, -1].log_softmax(-1)
            if asked.temperature:
                chances = (found / asked.temperature).softmax(-1)
                token = int(torch.multinomial(chances, 1, generator=self._numbers))
            else:
                token = int(found.argmax())
            ids.append(token)
            logprobs.append(float(found[token]))
            if token == self.model.config.eos_token_id and not asked.ignore_eos:
                return ids, logprobs, "stop"
            if len(ids) == asked.max_tokens:
                return ids, logprobs, "length"
            given = torch.tensor([[token]])
