"""The block ``errata`` of VeRL's configuration: which environment the agent loop plays and how, and the channels."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from errata_protocol.errors import InvalidRequest

from ...assembly.counterfactual import CounterfactualCheck
from ...assembly.pair_source import PairSource
from ...channels.schedules import Weight
from ...hints import Hinter
from ...settings import ChannelSettings

ChannelForm = Literal["loss", "estimator"]
CHANNELS = "channels"
"""Key of the channels' options in the block ``errata``."""


@dataclass(frozen=True, slots=True)
class EpisodeOptions:
    """How episodes are played.

    Args:
        url: URL of the environment: ``http://host:8000``, or ``http://host:8000/NAME`` where the server has several.
        env: Name of the environment on its server.
        tools: Names of the tools that the student may call; None is all.
        task_columns: Columns of a row that ``reset`` is given; None for the column ``task``, a JSON object.
        headers: Headers of each request and connect. VeRL prints its whole configuration, so a token does not belong
            here.
        token_env: Name of the environment variable that holds the server's token, in each of VeRL's processes; None for
            a server without one.
        message_timeout_s: Longest wait of the client for an answer in seconds, reconnects included.
        retries: Most times that a request is sent again after a failure that the server rolled back.
        call_s: Longest time of a reset or of a call, in seconds; None for no limit but the client's.
        episode_s: Longest time that an episode spends in the environment in all, in seconds; None for no limit. What
            the generator takes does not count.
        turns: Most turns of the student; None for no limit.
        turn_tokens: Most tokens of one turn; None for what is left of the response.
        tool_format: Name of VeRL's parser of tool calls; None for ``rollout.multi_turn.format``.
    """

    url: str
    env: str = "terminal"
    tools: Sequence[str] | None = None
    task_columns: Sequence[str] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    token_env: str | None = None
    message_timeout_s: float = 1000.0
    retries: int = 2
    call_s: float | None = None
    episode_s: float | None = None
    turns: int | None = None
    turn_tokens: int | None = None
    tool_format: str | None = None

    def __post_init__(self) -> None:
        for name in ("turns", "turn_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"errata.{name} is {value}: give at least 1, or null for no limit")
        for name in ("tools", "task_columns"):
            if isinstance(getattr(self, name), str):
                raise ValueError(f"errata.{name} is a list of names: [{getattr(self, name)}]")

    def all_headers(self) -> dict[str, str]:
        """Return the headers of each request, with the token.

        Raises:
            ValueError: The environment variable of the token is not set in this process.
        """
        if self.token_env is None:
            return dict(self.headers)
        token = os.environ.get(self.token_env)
        if not token:
            raise ValueError(
                f"errata.token_env names {self.token_env}, which is not set here: export it where Ray starts, or set "
                "it in ray_kwargs.ray_init.runtime_env.env_vars"
            )
        return {**self.headers, "Authorization": f"Bearer {token}"}

    def task_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of ``reset`` that begin the task of a row of the data set.

        Args:
            row: Columns of the row by name.

        Raises:
            InvalidRequest: The row lacks a column, or ``task`` is no JSON object.
        """
        columns = ("task",) if self.task_columns is None else self.task_columns
        for name in columns:
            if name not in row:
                raise InvalidRequest(
                    f"a row of the data set has no column {name!r} (it has {', '.join(sorted(row))}): make the files "
                    "with errata_trainer.recipes.verl.write_dataset, or name columns in errata.task_columns"
                )
        if self.task_columns is not None:
            return {name: row[name] for name in columns if row[name] is not None}
        task = row["task"]
        try:
            task = json.loads(task) if isinstance(task, str) else task
        except ValueError as error:
            raise InvalidRequest(f"the column task is no JSON: {error}") from error
        if not isinstance(task, Mapping):
            raise InvalidRequest(f"the column task is no JSON object but {type(task).__name__}")
        # A file of Parquet gives each row all names that any row has.
        return {name: value for name, value in task.items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChannelOptions:
    """Channels 2 and 3 of a run, in the words of the TRL recipe.

    Args:
        form: Place where the channels act: ``loss``, with terms of their own in the actor's loss; or ``estimator``, as
            parts of the advantages of tokens, which works with any of VeRL's engines.
        alpha_sdpo: Weight of channel 2 (``algorithm.alpha_sdpo``), or a schedule of it by step.
        beta_replay: Weight of channel 3 (``algorithm.beta_replay``), or a schedule of it by step.
        beta_dpo: DPO's beta: how strongly channel 3 keeps the policy near its reference.
        jsd_beta: Weight of the teacher in the generalized JSD: 0 is KL(teacher || student), 1 KL(student || teacher).
        token_clip: Upper bound of a token's divergence in channel 2; None for none.
        settings: All other options of the channels.
        hinter: Writer of the hints of channel 2; None for the templates of this package.
        check: Check in the environment whether hints help; None for none.
        pairs: Source of channel 3's pairs; None switches channel 3 off.
        completions: Most completions of each batch that are printed, as a table; None for all.
    """

    form: ChannelForm = "loss"
    alpha_sdpo: Weight = 0.1
    beta_replay: Weight = 0.05
    beta_dpo: float = 0.1
    jsd_beta: float = 0.5
    token_clip: float | None = 10.0
    settings: ChannelSettings = field(default_factory=ChannelSettings)
    hinter: Hinter | None = None
    check: CounterfactualCheck | None = None
    pairs: PairSource | None = None
    completions: int | None = 0

    def __post_init__(self) -> None:
        if self.form not in get_args(ChannelForm):
            raise ValueError(f"errata.channels.form is {self.form!r}: use {' or '.join(get_args(ChannelForm))}")

    @property
    def compares(self) -> bool:
        """Whether channel 3 is a loss over pairs, in any step."""
        return self.form == "loss" and self.pairs is not None and self.beta_replay != 0

    def of_losses(self, sampling_temperature: float) -> LossOptions:
        """Return what the processes of the actor need of this.

        Args:
            sampling_temperature: Temperature of the rollouts.
        """
        pairs = self.pairs
        return LossOptions(
            # Scores of turns are added to advantages, not to the actor's loss.
            dataclasses.replace(self.settings, prm_weight=0.0),
            distils=self.form == "loss" and self.alpha_sdpo != 0,
            has_pairs=self.compares,
            nll=pairs.nll if pairs is not None else 0.0,
            beta_dpo=self.beta_dpo,
            jsd_beta=self.jsd_beta,
            token_clip=self.token_clip,
            sampling_temperature=sampling_temperature,
        )


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Options of the losses of channels 2 and 3, for the processes of the actor.

    Args:
        settings: Options of the channels.
        distils: Whether channel 2 has a weight in any step.
        has_pairs: Whether channel 3 has a source of pairs, and a weight in any step.
        nll: Weight of the chosen action's negative log-likelihood that the source of pairs wants.
        beta_dpo: DPO's beta.
        jsd_beta: Weight of the teacher in the generalized JSD.
        token_clip: Upper bound of a token's divergence in channel 2; None for none.
        sampling_temperature: Temperature of the rollouts.
    """

    settings: ChannelSettings
    distils: bool = True
    has_pairs: bool = False
    nll: float = 0.0
    beta_dpo: float = 0.1
    jsd_beta: float = 0.5
    token_clip: float | None = 10.0
    sampling_temperature: float = 1.0


def options_of(config: Any) -> EpisodeOptions:
    """Return the options of episodes in the block ``errata`` of a configuration.

    Args:
        config: VeRL's configuration, an OmegaConf mapping or a plain one.

    Raises:
        ValueError: There is no such block or no URL in it, or an option that is not known or out of its range.
    """
    block = config.get("errata")
    if block is None or not block.get("url"):
        raise ValueError("the agent loop errata needs the URL of a server: +errata.url=http://host:8000/NAME")
    given = {str(name): _plain(block[name]) for name in block if name != CHANNELS}
    return EpisodeOptions(**_known("errata", given, EpisodeOptions, CHANNELS))


def channel_options_of(config: Any, *, made: bool = True) -> ChannelOptions:
    """Return the options of the channels, from ``errata.channels`` and the weights in ``algorithm``.

    A schedule, the hinter, the check and the source of pairs are objects, each given by Hydra's ``_target_`` and its
    arguments.

    Args:
        config: VeRL's configuration, an OmegaConf mapping or a plain one.
        made: Whether these objects are made; if not, their descriptions stand in their place.

    Raises:
        ValueError: An option is not known or out of its range.
    """
    given = _plain((config.get("errata") or {}).get(CHANNELS) or {})
    algorithm = config.get("algorithm") or {}
    weights = {name: _plain(algorithm[name]) for name in WEIGHTS if name in algorithm}
    for name in WEIGHTS:
        if name in given:
            raise ValueError(f"the weight {name} stands in algorithm.{name}, not in errata.{CHANNELS}")
    values = {name: value for name, value in {**given, **weights}.items() if name != "settings"}
    if made:
        values = {name: _made(value) for name, value in values.items()}
    settings = given.get("settings") or {}
    values["settings"] = ChannelSettings(**_known(f"errata.{CHANNELS}.settings", settings, ChannelSettings))
    return ChannelOptions(**_known(f"errata.{CHANNELS}", values, ChannelOptions))


WEIGHTS = ("alpha_sdpo", "beta_replay")
"""Weights of the channels, which stand in VeRL's block ``algorithm``."""


def _known(where: str, given: dict[str, Any], kind: type, *more: str) -> dict[str, Any]:
    """Return options, lists as tuples, if all of them are fields of a class.

    Raises:
        ValueError: One of them is not.
    """
    known = [one.name for one in dataclasses.fields(kind)]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no option {where}.{name}: there are {', '.join([*known, *more])}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def _made(value: Any) -> Any:
    """Return the object of Hydra's description; any other value as it is."""
    if isinstance(value, Mapping) and "_target_" in value:
        from hydra.utils import instantiate

        return instantiate(value)
    return value


def _plain(value: Any) -> Any:
    """Return a value of a configuration without OmegaConf's types."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
