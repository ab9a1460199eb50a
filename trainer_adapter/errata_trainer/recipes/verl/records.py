"""What the agent loop hands to the trainer with each rollout, as JSON in ``extra_fields``, and how it is read there.

VeRL keeps a rollout's fields in its transfer queue, of which each process reads what it needs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...assembly.batch import Transcripts
from ...episodes.conversation import Conversation
from ...episodes.playing import Session
from ...episodes.record import EpisodeRecord
from ...episodes.recorded import RecordedEpisode
from ...episodes.tools import PlayedEnvironment

HANDED_OVER = "errata"
"""Key of ``extra_fields``: `handed_over`'s text."""

log = logging.getLogger("errata.trainer")


@dataclass(frozen=True, slots=True)
class Row:
    """A rollout as the trainer has it, without padding.

    Attributes:
        key: Key of the row in VeRL's transfer queue.
        group: Group of the row; rows of one group have the same task.
        prompt_ids: Tokens of the prompt.
        response_ids: Tokens after the prompt.
        mask: 1 for each of ``response_ids`` that was sampled, 0 for the others.
        logprobs: Log-probability of each of ``response_ids`` when it was sampled; None if the generator gave none.
        handed_over: Text of `handed_over`; None for a row of another agent loop.
    """

    key: str
    group: str
    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float] | None = None
    handed_over: str | None = None


def handed_over(said: Conversation, record: EpisodeRecord) -> str:
    """Return the messages and the record of an episode, as the text of a JSON object.

    Args:
        said: Conversation of the episode.
        record: Record of the episode.
    """
    return json.dumps({"prompt": said.prompt, "messages": said.messages, "episode": record.to_json()})


def read_rows(
    rows: Sequence[Row], environment: PlayedEnvironment, connect: Callable[[], Session]
) -> tuple[Transcripts, list[RecordedEpisode | None]]:
    """Return a batch's transcripts and the episode of each row; None for a row that was not played by this recipe.

    A row whose text cannot be read has no episode, and is logged.

    Args:
        rows: Rows of the batch, B in all.
        environment: Environment that is played.
        connect: Opens a session of the environment, for forks.
    """
    prompts: list[list[dict[str, Any]]] = []
    messages: list[list[dict[str, Any]]] = []
    episodes: list[RecordedEpisode | None] = []
    for row in rows:
        prompt, said, episode = _read(row, environment, connect)
        prompts.append(prompt)
        messages.append(said)
        episodes.append(episode)
    logprobs = [row.logprobs for row in rows if row.logprobs is not None]
    transcripts = Transcripts(
        prompts,
        [row.prompt_ids for row in rows],
        [row.response_ids for row in rows],
        [row.mask for row in rows],
        messages,
        logprobs if len(logprobs) == len(rows) else None,
    )
    return transcripts, episodes


def _read(
    row: Row, environment: PlayedEnvironment, connect: Callable[[], Session]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], RecordedEpisode | None]:
    if row.handed_over is None:
        return [], [], None
    try:
        given: Mapping[str, Any] = json.loads(row.handed_over)
        record = EpisodeRecord.from_json(given["episode"], environment)
    except (ValueError, KeyError) as error:  # channel 1 trains on it all the same
        log.warning("row %s: its episode cannot be read, so channels 2 and 3 leave it out: %s", row.key, error)
        return [], [], None
    return given["prompt"], given["messages"], RecordedEpisode(record, connect)
