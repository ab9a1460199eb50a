"""From rollouts to error sites that can be distilled: which turns, with which hints, kept or not."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .channels.splicing import DoesNotFit, splice
from .counterfactual import Calls, CounterfactualCheck, Question
from .hints import FailedTurn, Hint, Hinter, HintRenderer
from .playing import Seat
from .rollout import Rollout, SdpoItem, state_of_turns

log = logging.getLogger("errata.trainer")

Sample = Callable[[Sequence[Sequence[int]]], list[Calls]]
"""Has the student take one turn behind each context, and returns the calls it made."""


@dataclass(frozen=True, slots=True)
class Site:
    """A failing turn with its hint.

    Attributes:
        row: Which rollout of the batch.
        failed: The turn.
        hint: What the teacher reads.
        item: What is compared.
    """

    row: int
    failed: FailedTurn
    hint: Hint
    item: SdpoItem


@dataclass(slots=True)
class Sites:
    """Finds a batch's error sites.

    Args:
        hinter: Writes hints.
        renderer: Renders them for the student's tokenizer.
        max_sites: Of one rollout; the first ones, before one mistake leads to another.
        max_length: Tokens of a teacher's row at most; None for no bound.
        check: Whether a hint helps, asked of the environment.

    Attributes:
        counts: What became of failing turns: ``kept``, ``no_hint``, ``too_long``, ``beyond_max_sites``,
            ``not_rendered``, ``not_spliced``, ``not_better``.
    """

    hinter: Hinter
    renderer: HintRenderer
    max_sites: int = 4
    max_length: int | None = None
    check: CounterfactualCheck = field(default_factory=CounterfactualCheck)
    counts: Counter[str] = field(default_factory=Counter)

    def found(
        self, rollouts: Sequence[Rollout], seats: Sequence[Seat | None], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Site]:
        """Return the sites of a batch, before the environment is asked about them.

        Args:
            rollouts: Row by row. Lost ones have no site.
            seats: Where they were played; None for a rollout that was not.
            tools: Descriptions of the student's tools, for hints about tools.
        """
        sites = []
        for row, (rollout, seat) in enumerate(zip(rollouts, seats, strict=True)):
            kept = 0
            for turn in rollout.turns if rollout.lost is None else ():
                call = turn.failed
                if call is None:
                    continue
                if kept == self.max_sites:
                    self.counts["beyond_max_sites"] += 1
                    continue
                failed = FailedTurn(rollout, turn, call, observation_of(seat, call.t), tools)
                hint = self.hinter.hint(failed)
                if hint is None:
                    self.counts["no_hint"] += 1
                    continue
                item = self._item(failed, hint)
                if item is not None:
                    kept += 1
                    sites.append(Site(row, failed, hint, item))
        return sites

    def _item(self, failed: FailedTurn, hint: Hint) -> SdpoItem | None:
        try:
            ids = self.renderer.hint_ids(hint.text, after="user" if failed.turn.start == 0 else "tool")
        except ValueError as error:  # it spells a special token, or the template takes no message there
            if not self.counts["not_rendered"]:
                log.warning("a hint has no tokens in the student's chat template, and is left out: %s", error)
            self.counts["not_rendered"] += 1
            return None
        try:
            return splice(
                failed.rollout,
                failed.turn,
                ids,
                header_ids=self.renderer.header_ids,
                max_length=self.max_length,
                hint_template_key=hint.key,
            )
        except DoesNotFit:
            self.counts["too_long"] += 1
            return None
        except ValueError as error:  # one odd rollout among many is no reason to end a run
            if not self.counts["not_spliced"]:
                log.warning("a hint cannot stand before its turn, and the site is left out: %s", error)
            self.counts["not_spliced"] += 1
            return None

    def kept(self, sites: Sequence[Site], seats: Sequence[Seat | None], sample: Sample) -> list[Site]:
        """Return the sites whose hints did better where the environment was asked, and those it was not asked about.

        Args:
            sites: Of a batch.
            seats: Of its rows.
            sample: The student, who takes the failing turn again with the hint before it.
        """
        if self.check.mode == "off":
            self.counts["kept"] += len(sites)
            return list(sites)
        chosen = [site for site in sites if seats[site.row] is not None]
        contexts = [site.item.teacher_ids[: len(site.item.teacher_ids) - len(site.item.target_ids)] for site in chosen]
        questions = []
        for site, calls in zip(chosen, sample(contexts), strict=True):
            seat = seats[site.row]
            assert seat is not None
            own = tuple((call.name, call.arguments) for call in site.failed.turn.calls)
            state = state_of_turns(site.failed.rollout)[site.failed.turn.index]
            assert state is not None, "it was played in a session"
            questions.append(Question(seat, state + 1, calls, own, site.hint.key))
        verdicts = dict(zip(map(id, chosen), self.check.ask(questions), strict=True))
        kept = [site for site in sites if self.check.keeps(verdicts.get(id(site)))]
        self.counts["kept"] += len(kept)
        self.counts["not_better"] += len(sites) - len(kept)
        return kept


def observation_of(seat: Seat | None, t: int | None) -> Mapping[str, Any]:
    """Return what was delivered as ``t``, decoded; empty where nothing was."""
    if seat is None or t is None:
        return {}
    if t == 0:
        return seat.opening
    return next((call.observation for call in seat.played if call.t == t), {})
