"""The block ``errata`` of VeRL's configuration: which environment the agent loop plays, and how."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from errata_protocol.errors import InvalidRequest


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


def options_of(config: Any) -> EpisodeOptions:
    """Return the options in the block ``errata`` of a configuration.

    Args:
        config: VeRL's configuration, an OmegaConf mapping or a plain one.

    Raises:
        ValueError: There is no such block or no URL in it, or an option that is not known or out of its range.
    """
    block = config.get("errata")
    if block is None or not block.get("url"):
        raise ValueError("the agent loop errata needs the URL of a server: +errata.url=http://host:8000/NAME")
    given = {str(name): _plain(block[name]) for name in block}
    known = [one.name for one in dataclasses.fields(EpisodeOptions)]
    for name in given:
        if name not in known:
            raise ValueError(f"there is no option errata.{name}: there are {', '.join(known)}")
    return EpisodeOptions(**given)


def _plain(value: Any) -> Any:
    """Return a value of a configuration without OmegaConf's types."""
    if isinstance(value, Mapping) or hasattr(value, "items"):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    return value
