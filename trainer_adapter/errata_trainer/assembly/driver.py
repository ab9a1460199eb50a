"""`ChannelDriver`: turns a batch of episodes into the training items of channels 2 and 3, independent of the trainer.

A recipe samples the episodes, tells the driver how to sample another turn from the student, and adds the losses of the
items and pairs to its own loss::

    driver = driver_for(settings, tokenizer=tokenizer, end_ids=[eos], tools=schemas, pairs=pairs)
    rollouts = driver.rollouts(transcripts, runners)
    items = driver.items(rollouts, runners, sample=sample)          # of each row, for channel 2
    driver.ask(rollouts, runners, transcripts)                      # teachers, about states of this batch
    rows = driver.pairs(4, rollouts, referred)                      # of each row, for channel 3
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from ..channels.pairs import placed
from ..channels.prm import turn_scores
from ..episodes.playing import Episode
from ..monitoring.metrics import OUTCOMES, Metrics
from ..rollouts.rollout import DpoPair, Rollout, SdpoItem
from ..rollouts.transcript import unmarked_errors
from .batch import Transcripts, rollouts_of
from .pair_source import PairSource, Referred, Votes
from .sites import Sample, Sites


class ChannelDriver:
    """Finds a batch's error sites and pairs, and records metrics about them.

    Args:
        sites: Finder of channel 2's error sites; None for no channel 2.
        pairs: Source of channel 3's pairs; None for no channel 3.
        tools: Descriptions of the student's tools, JSON Schema.
        opening: Text that opens a tool call; see `build_rollout`.
        end_ids: Tokens that end a turn.
        metrics: Metrics in which counts are recorded; default: new ones.
    """

    def __init__(
        self,
        *,
        sites: Sites | None = None,
        pairs: PairSource | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
        opening: str | None = None,
        end_ids: Collection[int] = (),
        metrics: Metrics | None = None,
    ) -> None:
        self.sites, self.pair_source = sites, pairs
        self.tools, self.opening, self.end_ids = tools, opening, end_ids
        self.metrics = metrics or Metrics()

    def read(self, transcripts: Transcripts, runners: Sequence[Episode | None]) -> tuple[list[Rollout], int]:
        """Return the `Rollout` of each row, and how many rows could not be converted; see `rollouts_of`."""
        return rollouts_of(transcripts, runners, tools=self.tools, opening=self.opening, end_ids=self.end_ids)

    def rollouts(self, transcripts: Transcripts, runners: Sequence[Episode | None]) -> list[Rollout]:
        """Return the `Rollout` of each row and record counts. Episodes that are still open are finished."""
        rollouts, unread = self.read(transcripts, runners)
        calls = sum(len(turn.calls) for rollout in rollouts for turn in rollout.turns)
        errors = sum(turn.failed is not None for rollout in rollouts for turn in rollout.turns)
        unmarked = sum(
            unmarked_errors(rollout, messages, runner.deliveries() if runner is not None else ())
            for rollout, messages, runner in zip(rollouts, transcripts.messages, runners, strict=True)
        )
        self.metrics.batch("rollouts/unread", unread)
        self.metrics.batch("rollouts/unmarked_errors", unmarked)
        self.metrics.mean("rollouts/calls", calls, len(rollouts))
        self.metrics.mean("rollouts/errors", errors, len(rollouts))
        return rollouts

    def items(
        self,
        rollouts: Sequence[Rollout],
        runners: Sequence[Episode | None],
        *,
        sample: Sample,
        trained: Sequence[bool] | None = None,
        groups: Sequence[Hashable] | None = None,
    ) -> list[tuple[SdpoItem, ...]]:
        """Return the error sites to distil, one tuple for each row.

        Args:
            rollouts: The batch's rollouts, B in all.
            runners: Runner of each rollout's episode; None for a row that was not played here.
            sample: Function that has the student take a turn; see `Sites.kept`.
            trained: Whether a row's tokens are trained on at all; default: all are.
            groups: Task of each row, by any name; default: rows with equal prompts have the same task.
        """
        rows: list[tuple[SdpoItem, ...]] = [()] * len(rollouts)
        if self.sites is None:
            return rows
        before = self.sites.counts.copy()
        found = self.sites.found(rollouts, runners, self.tools, groups)
        in_loss = [one for one in found if trained is None or trained[one.row]]
        self.sites.counts["row_not_trained"] += len(found) - len(in_loss)
        found = self.sites.kept(in_loss, runners, sample)
        for site in found:
            rows[site.row] = (*rows[site.row], site.item)
        self.metrics.mean("sdpo/sites", len(found), len(rollouts))
        for outcome in OUTCOMES:  # also of those that did not occur: the log has means over batches
            self.metrics.batch(f"sdpo/{outcome}", self.sites.counts[outcome] - before[outcome])
        return rows

    def ask(self, rollouts: Sequence[Rollout], runners: Sequence[Episode | None], transcripts: Transcripts) -> None:
        """Pass a batch to the pair source, which may start to ask its teachers."""
        if self.pair_source is not None:
            self.pair_source.observe(rollouts, runners, transcripts)

    @property
    def votes(self) -> Votes:
        """Teachers' votes at states, which came with the last `pairs`."""
        return self.pair_source.votes if self.pair_source is not None else {}

    def turn_scores(self, rollouts: Sequence[Rollout]) -> list[list[float | None]]:
        """Return the teachers' consensus score of each turn; None for turns whose votes have not come.

        It is read after `pairs`, from the margins of the pair source.
        """
        margins = (self.pair_source.margins if self.pair_source is not None else None) or {}
        scores = turn_scores(rollouts, margins)
        self.metrics.batch("prm/turns", sum(score is not None for of_row in scores for score in of_row))
        self.metrics.mean("prm/score", sum(margins.values()), len(margins))
        return scores

    def pairs(self, count: int, rollouts: Sequence[Rollout], referred: Referred) -> list[tuple[DpoPair, ...]]:
        """Return up to ``count`` pairs, one tuple for each row. A pair whose rejected action is in this batch stands in
        its row.

        Args:
            count: Most pairs to return.
            rollouts: The batch's rollouts.
            referred: Function that gives new pairs the log-probabilities of the reference.
        """
        if self.pair_source is None:
            return [()] * len(rollouts)
        chosen = self.pair_source.sample(count, referred)
        for name, value in self.pair_source.metrics().items():
            self.metrics.running(f"dpo/{name}", value)
        return placed(chosen, rollouts)
