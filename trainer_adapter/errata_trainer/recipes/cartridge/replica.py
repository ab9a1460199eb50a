"""A Tokasaurus server as a rollout engine of VeRL: ``actor_rollout_ref.rollout.name=tokasaurus``.

The server runs by itself, and its address stands in the settings of the rollout::

    actor_rollout_ref.rollout.custom.url=http://host:10210
    actor_rollout_ref.rollout.custom.cartridge=errata-000060

VeRL loads it with the environment variable ``VERL_USE_EXTERNAL_MODULES=errata_trainer.recipes.cartridge.replica``. The
weights that VeRL trains do not reach the server: it plays rollouts of the base model with a cartridge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from errata_protocol.errors import InvalidRequest

from .server import TokasaurusClient

TOKASAURUS = "tokasaurus"
"""Name of the engine: ``actor_rollout_ref.rollout.name``."""

_NEUTRAL = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Settings that Tokasaurus does not have, with the value that changes nothing."""
_READ = frozenset({"logprobs", "n", "max_new_tokens", "max_tokens", "temperature", "ignore_eos"})
"""Settings that are read; ``logprobs`` is always done."""


def translated(sampling_params: Mapping[str, Any], *, longest: int | None = None) -> dict[str, Any]:
    """Return VeRL's settings of the generator as arguments of `TokasaurusClient.complete`.

    Args:
        sampling_params: VeRL's settings.
        longest: Most tokens of a completion where the settings do not say, and at most otherwise:
            ``rollout.response_length``. None for no bound.

    Raises:
        InvalidRequest: A setting that Tokasaurus does not have, with a value that would change the sampling; or there
            is no limit of tokens.
    """
    for name, value in sampling_params.items():
        if name in _NEUTRAL:
            if value is not None and value != _NEUTRAL[name]:
                raise InvalidRequest(f"Tokasaurus has no {name}: set it to {_NEUTRAL[name]}, it is {value}")
        elif name not in _READ and value is not None:
            raise InvalidRequest(f"Tokasaurus has no setting {name} (it is {value!r:.80}): leave it out")
    most = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or longest
    if not most:
        raise InvalidRequest("Tokasaurus needs max_tokens: set actor_rollout_ref.rollout.response_length")
    if sampling_params.get("n") not in (None, 1):
        raise InvalidRequest(f"a request of VeRL has one completion, not n={sampling_params['n']}")
    temperature = sampling_params.get("temperature")
    return {
        "max_tokens": int(most if longest is None else min(most, longest)),
        "temperature": 1.0 if temperature is None else float(temperature),
        "ignore_eos": bool(sampling_params.get("ignore_eos", False)),
    }


class TokasaurusServer:
    """What VeRL calls on a rollout server, in an actor of Ray, for one Tokasaurus server.

    Args:
        url: Base URL of the server.
        cartridge: Id of the cartridge in front of all prompts; None for none.
        timeout_s: Longest time of a request without a byte of its answer, in seconds.
        longest: Most tokens of a completion; None for what requests say.

    Raises:
        ServiceError: No Tokasaurus server answers there.
    """

    def __init__(
        self, url: str, cartridge: str | None = None, timeout_s: float = 600.0, longest: int | None = None
    ) -> None:
        self._client = TokasaurusClient(url, timeout_s=timeout_s)
        self._client.ping()
        self._cartridge, self._longest = cartridge, longest

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str = "",
        image_data: Any = None,
        video_data: Any = None,
        **_: Any,
    ) -> TokenOutput:
        """Return a completion.

        Args:
            prompt_ids: Tokens of the prompt.
            sampling_params: VeRL's settings of the generator.
            request_id: Id of the request, which is not used.
            image_data: Images, which Tokasaurus does not take.
            video_data: Videos, which Tokasaurus does not take.

        Raises:
            InvalidRequest: The server cannot do what is asked.
            ServiceError: The server failed.
        """
        if image_data or video_data:
            raise InvalidRequest("Tokasaurus takes no images and no videos")
        given = translated(sampling_params, longest=self._longest)
        [made] = await asyncio.to_thread(self._client.complete, list(prompt_ids), cartridge=self._cartridge, **given)
        return TokenOutput(token_ids=list(made.ids), log_probs=list(made.logprobs), stop_reason="completed")

    async def use_cartridge(self, cartridge: str | None) -> None:
        """Put another cartridge in front of the prompts that come from now on.

        Args:
            cartridge: Id of the cartridge; None for none.
        """
        self._cartridge = cartridge

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: the server keeps its memory, and its weights do not change."""

    wake_up = sleep = abort_all_requests = resume_generation = _nothing
    clear_kv_cache = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class TokasaurusReplica(RolloutReplica):  # type: ignore[misc]
    """One Tokasaurus server among VeRL's replicas. Its arguments are those of VeRL's class.

    VeRL's standalone mode asks Ray for GPUs, of which a server that runs by itself needs none: use the hybrid mode.
    """

    async def launch_servers(self) -> None:
        """Begin an actor that asks the server of this replica.

        Raises:
            InvalidRequest: ``rollout.custom.url`` is not set, or names fewer servers than there are replicas.
        """
        import ray

        custom: Mapping[str, Any] = self.config.custom or {}
        urls = custom.get("url")
        urls = [urls] if isinstance(urls, str) else list(urls or ())
        if self.replica_rank >= len(urls):
            raise InvalidRequest(
                f"replica {self.replica_rank} has no Tokasaurus server: give one URL for each replica in "
                "actor_rollout_ref.rollout.custom.url"
            )
        url = urls[self.replica_rank]
        actor = ray.remote(TokasaurusServer).options(
            name=f"tokasaurus_server_{self.replica_rank}{self.name_suffix}", max_concurrency=self.max_concurrency
        )
        self._server_handle = actor.remote(
            url, custom.get("cartridge"), float(custom.get("timeout_s", 600.0)), self.config.response_length
        )
        self.servers, self._server_address = [self._server_handle], url


class ServerAdapter(rollout_base.BaseRollout):  # type: ignore[misc]
    """Stands beside VeRL's training engine, whose weights Tokasaurus does not take."""

    async def resume(self, tags: Sequence[str]) -> None:
        """Do nothing: nothing was released.

        Args:
            tags: Parts of the memory, which are the server's own.
        """

    async def release(self) -> None:
        """Do nothing: the server keeps its memory."""

    async def update_weights(self, weights: Any, **_: Any) -> None:
        """Take the weights, and leave them: the server's are those of the base model.

        Args:
            weights: Names and tensors.
        """
        async for _one in ensure_async_iterator(weights):
            pass


def register() -> None:
    """Register the engine with VeRL; importing this module does it."""
    RolloutReplicaRegistry.register(TOKASAURUS, lambda: TokasaurusReplica)
    rollout_base._ROLLOUT_REGISTRY[TOKASAURUS, "async"] = f"{__name__}.ServerAdapter"


register()
