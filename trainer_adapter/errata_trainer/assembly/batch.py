"""A batch of episodes in the trainer's form (token ids, masks, messages), and its conversion to `Rollout` records."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..episodes.playing import Episode
from ..rollouts.rollout import Rollout
from ..rollouts.transcript import build_rollout

log = logging.getLogger("errata.trainer")


@dataclass(frozen=True, slots=True)
class Transcripts:
    """A batch of B rollouts, row by row, before anything is padded or masked.

    Attributes:
        prompts: Messages of each row's prompt.
        prompt_ids: Tokens of each row's prompt.
        completion_ids: Tokens of each row after its prompt.
        masks: 1 for each of ``completion_ids`` that was sampled, 0 for the others.
        messages: Messages of each row's completion.
        logprobs: Log-probability of each of ``completion_ids`` when it was sampled; None if the generator does not give
            them.
    """

    prompts: list[list[dict[str, Any]]]
    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    masks: list[list[int]]
    messages: list[list[dict[str, Any]]]
    logprobs: list[list[float]] | None


def rollouts_of(
    transcripts: Transcripts,
    runners: Sequence[Episode | None],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    opening: str | None = None,
    end_ids: Collection[int] = (),
) -> tuple[list[Rollout], int]:
    """Return the `Rollout` of each row, and how many rows could not be converted.

    Episodes that are still open are finished. A row whose turns cannot be separated becomes a rollout without turns, so
    that channels 2 and 3 skip it, and is logged.

    Args:
        transcripts: The batch's transcripts.
        runners: The runner that played each row; None for a row that was not played here.
        tools: Descriptions of the student's tools.
        opening: Text that opens a tool call; see `build_rollout`.
        end_ids: Tokens that end a turn.
    """
    rollouts, unread = [], 0
    for row, runner in enumerate(runners):
        prompt, completion, mask = (
            transcripts.prompt_ids[row],
            transcripts.completion_ids[row],
            transcripts.masks[row],
        )
        reward = runner.finish() if runner is not None else None
        try:
            rollout = build_rollout(
                prompt,
                completion,
                mask,
                transcripts.messages[row],
                runner.deliveries() if runner is not None else (),
                tools=tools,
                opening=opening,
                eid=runner.eid if runner is not None else None,
                environment=runner.environment.name if runner is not None else None,
                reward=reward,
                logprobs=transcripts.logprobs[row] if transcripts.logprobs is not None else None,
                end_ids=end_ids,
                lost=runner.lost if runner is not None else None,
                task=runner.task if runner is not None else None,
            )
        except ValueError as error:  # channel 1 has trained on it all the same
            log.warning("row %d: its turns cannot be separated, so channels 2 and 3 leave it out: %s", row, error)
            unread += 1
            sampled = tuple(int(bool(one)) for one in mask) if mask is not None else (1,) * len(completion)
            rollout = Rollout(tuple(prompt), tuple(completion), sampled, turns=(), reward=reward)
        rollouts.append(rollout)
    return rollouts, unread
