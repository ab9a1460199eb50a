"""Finds the error sites of a batch that channel 2 distils: which failing turns, with which hints and weights."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from ..channels.splicing import DoesNotFit, splice
from ..episodes.playing import Episode
from ..hints import Attempt, BatchHinter, FailedTurn, Hint, Hinter, HintRenderer, key_of, write_hints
from ..rollouts.rollout import Rollout, SdpoItem, state_of_turns
from .counterfactual import Calls, CounterfactualCheck, Question, Verdict

log = logging.getLogger("errata.trainer")

Sample = Callable[[Sequence[Sequence[int]]], list[Calls | None]]
"""Has the student take one turn behind each context, and returns the calls it made; None where it could not."""


@dataclass(frozen=True, slots=True)
class Site:
    """A failing turn with its hint.

    Attributes:
        row: Index of the rollout in the batch.
        failed: The failing turn.
        hint: The hint that the teacher reads.
        item: The teacher's row and the tokens that are compared.
    """

    row: int
    failed: FailedTurn
    hint: Hint
    item: SdpoItem

    @property
    def context_ids(self) -> tuple[int, ...]:
        """The token ids that the teacher reads before the turn: history, hint and generation prompt."""
        turn = self.failed.turn
        return self.item.teacher_ids[: len(self.item.teacher_ids) - (turn.stop - turn.start)]


@dataclass(slots=True)
class Sites:
    """Finds the error sites of a batch.

    Args:
        hinter: Writes hints. One that has ``begin_batch(attempts)`` is given the whole batch first; one whose
            ``concurrent`` is true is called from several threads.
        renderer: Renders the hints for the student's tokenizer.
        max_sites: Most sites taken from one rollout: the first ones, because later errors often follow from them.
        max_length: Most tokens of a teacher's row; None for no bound.
        check: Counterfactual check of hints in the environment; off by default.
        hint_keys: Shell patterns (``fs.*``) of the hint template keys to distil; a key has to match one of them. A
            pattern that begins with ``!`` excludes keys. None distils all.
        max_site_share: Largest share of a batch's target tokens, by weight, that one site may have, in (0, 1].
        max_key_share: Largest share of a batch's target tokens, by weight, that all sites of one key may have together,
            in (0, 1].
        threads: Hints written at the same time by a hinter that is ``concurrent``.
        decode: Returns the text of tokens without special ones; a hinter with ``begin_batch`` needs it.
        targets: Returns the ranges of a turn's tokens that are compared, given the turn's tokens, e.g.
            `ActionTokens.call_spans`; a turn for which it returns none has no site. None compares whole turns.

    Attributes:
        counts: Number of failing turns by outcome: ``kept``, ``other_key``, ``no_hint``, ``too_long``,
            ``beyond_max_sites``, ``not_rendered``, ``not_spliced``, ``no_targets``, ``not_better``,
            ``row_not_trained``; and ``not_sampled``, whose hint could not be checked.

    Raises:
        ValueError: A share out of its range; a hinter that needs ``decode``.
    """

    hinter: Hinter
    renderer: HintRenderer
    max_sites: int = 4
    max_length: int | None = None
    check: CounterfactualCheck = field(default_factory=CounterfactualCheck)
    hint_keys: Sequence[str] | None = None
    max_site_share: float = 1.0
    max_key_share: float = 1.0
    threads: int = 16
    decode: Callable[[Sequence[int]], str] | None = None
    targets: Callable[[Sequence[int]], Sequence[range]] | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name in ("max_site_share", "max_key_share"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a share in (0, 1], got {getattr(self, name)}")
        if isinstance(self.hint_keys, str):
            raise ValueError(f"hint_keys is a sequence of patterns: [{self.hint_keys!r}]")
        if isinstance(self.hinter, BatchHinter) and self.decode is None:
            raise ValueError(f"{type(self.hinter).__name__} reads other rollouts of a batch: give decode=")

    def found(
        self,
        rollouts: Sequence[Rollout],
        runners: Sequence[Episode | None],
        tools: Sequence[Mapping[str, Any]] = (),
        groups: Sequence[Hashable] | None = None,
    ) -> list[Site]:
        """Return the error sites of a batch with their hints, before the counterfactual check.

        Args:
            rollouts: The batch's rollouts, one for each row. Lost rollouts have no sites.
            runners: The runner that played each rollout; None for a rollout that was not played here.
            tools: Descriptions of the student's tools, for hints about tools.
            groups: Task of each row, as any key: rows with equal keys have the same task. By default rows with equal
                prompts.
        """
        if isinstance(self.hinter, BatchHinter) and self.decode is not None:
            decode, known = self.decode, groups or [rollout.prompt_ids for rollout in rollouts]
            self.hinter.begin_batch(
                [
                    Attempt(
                        rollout, group, tuple(decode(rollout.completion_ids[t.start : t.stop]) for t in rollout.turns)
                    )
                    for rollout, group in zip(rollouts, known, strict=True)
                ]
            )
        waiting = []
        for row, (rollout, runner) in enumerate(zip(rollouts, runners, strict=True)):
            turns: deque[FailedTurn] = deque()
            for turn in rollout.turns if rollout.lost is None else ():
                if turn.failed is None:
                    continue
                failed = FailedTurn(rollout, turn, turn.failed, observation_of(runner, turn.failed.t), tools)
                if self._wanted(failed):
                    turns.append(failed)
                else:
                    self.counts["other_key"] += 1
            waiting.append((row, turns))
        sites: list[list[Site]] = [[] for _ in rollouts]
        while True:  # a turn without a hint leaves its place to a later one
            asked = [
                (row, turns.popleft())
                for row, turns in waiting
                for _ in range(min(len(turns), self.max_sites - len(sites[row])))
            ]
            if not asked:
                break
            threads = self.threads if getattr(self.hinter, "concurrent", False) else 1
            hints = write_hints(self.hinter, [failed for _, failed in asked], threads=threads)
            for (row, failed), hint in zip(asked, hints, strict=True):
                item = self._item(failed, hint) if hint is not None else None
                if hint is None:
                    self.counts["no_hint"] += 1
                elif item is not None:
                    sites[row].append(Site(row, failed, hint, item))
        self.counts["beyond_max_sites"] += sum(len(turns) for _, turns in waiting)
        return [site for of_row in sites for site in of_row]

    def _wanted(self, failed: FailedTurn) -> bool:
        """Return whether `hint_keys` selects the key of a failing turn."""
        if self.hint_keys is None:
            return True
        key = key_of(failed) or ""
        left_out = [pattern[1:] for pattern in self.hint_keys if pattern.startswith("!")]
        wanted = [pattern for pattern in self.hint_keys if not pattern.startswith("!")]
        return not any(fnmatchcase(key, one) for one in left_out) and (
            not wanted or any(fnmatchcase(key, one) for one in wanted)
        )

    def _item(self, failed: FailedTurn, hint: Hint) -> SdpoItem | None:
        try:
            ids = self.renderer.hint_ids(hint.text, after="user" if failed.turn.start == 0 else "tool")
        except ValueError as error:  # it spells a special token, or the template takes no message there
            if not self.counts["not_rendered"]:
                log.warning("a hint has no tokens in the student's chat template, and is left out: %s", error)
            self.counts["not_rendered"] += 1
            return None
        turn, targets = failed.turn, None
        if self.targets is not None:
            targets = self.targets(failed.rollout.completion_ids[turn.start : turn.stop])
            if not targets:
                self.counts["no_targets"] += 1
                return None
        try:
            return splice(
                failed.rollout,
                turn,
                ids,
                header_ids=self.renderer.header_ids,
                max_length=self.max_length,
                hint_template_key=hint.key,
                targets=targets,
            )
        except DoesNotFit:
            self.counts["too_long"] += 1
            return None
        except ValueError as error:  # one odd rollout among many is no reason to end a run
            if not self.counts["not_spliced"]:
                log.warning("a hint cannot stand before its turn, and the site is left out: %s", error)
            self.counts["not_spliced"] += 1
            return None

    def kept(self, sites: Sequence[Site], runners: Sequence[Episode | None], sample: Sample) -> list[Site]:
        """Return the sites to distil with their weights, after the counterfactual check.

        Those whose hints did not do better where the environment was asked are left out. Those it was not asked about
        weigh what hints of their key are worth (`CounterfactualCheck.weight`), within the shares.

        Args:
            sites: Sites of the batch.
            runners: The runner that played each row of the batch; None for a row that was not played here.
            sample: Has the student take each failing turn again, with the hint before it. It is called once unless the
                check is off, also without contexts, because other ranks may have some.
        """
        verdicts: dict[int, Verdict] = {}
        if self.check.mode != "off":
            verdicts = self._verdicts([site for site in sites if runners[site.row] is not None], runners, sample)
        kept = []
        for site in sites:
            verdict = verdicts.get(id(site))
            if self.check.keeps(verdict):
                sure = verdict is not None or self.check.mode == "off"
                kept.append(site if sure else weighed(site, self.check.weight(site.hint.key)))
        self.counts["kept"] += len(kept)
        self.counts["not_better"] += len(sites) - len(kept)
        return capped(kept, self.max_site_share, self.max_key_share)

    def _verdicts(self, sites: Sequence[Site], runners: Sequence[Episode | None], sample: Sample) -> dict[int, Verdict]:
        """Return the verdicts of the sites that the check chose, by ``id(site)``."""
        chosen = [sites[n] for n in self.check.chosen(len(sites))]
        contexts = [site.context_ids for site in chosen]
        questions = {}
        for site, calls in zip(chosen, sample(contexts), strict=True):
            runner, state = runners[site.row], state_of_turns(site.failed.rollout)[site.failed.turn.index]
            if calls is None or runner is None or state is None:
                self.counts["not_sampled"] += 1
                continue
            own = tuple((call.name, call.arguments) for call in site.failed.turn.calls)
            questions[id(site)] = Question(runner, state + 1, calls, own, site.hint.key)
        return dict(zip(questions, self.check.answers(list(questions.values())), strict=True))


def weighed(site: Site, factor: float) -> Site:
    """Return a site with its token weights multiplied by ``factor``."""
    return site if factor == 1.0 else replace(site, item=replace(site.item, weight=site.item.weight * factor))


def capped(sites: Sequence[Site], max_site_share: float, max_key_share: float) -> list[Site]:
    """Return sites with weights reduced so that no site and no key exceeds its share of the batch.

    A bound is a share of the batch's target tokens, but never less than an equal share: a site that is alone keeps its
    weight.

    Args:
        sites: Sites of one rank's batch.
        max_site_share: Largest share of one site, in (0, 1].
        max_key_share: Largest share of all sites of one key together, in (0, 1].
    """
    total = sum(len(site.item.target_ids) for site in sites)
    of_site = max(max_site_share, 1.0 / max(1, len(sites))) * total
    within = [weighed(site, min(1.0, of_site / len(site.item.target_ids))) for site in sites]
    keys: dict[str, float] = {}
    for site in within:
        keys[site.hint.key] = keys.get(site.hint.key, 0.0) + site.item.weight * len(site.item.target_ids)
    of_key = max(max_key_share, 1.0 / max(1, len(keys))) * total
    return [weighed(site, min(1.0, of_key / max(keys[site.hint.key], 1e-9))) for site in within]


def observation_of(runner: Episode | None, t: int | None) -> Mapping[str, Any]:
    """Return the decoded observation of delivery ``t`` of the runner's current episode.

    It is empty without a runner or ``t``, and if the episode has no such delivery.
    """
    if runner is None or t is None:
        return {}
    if t == 0:
        return runner.opening
    return next((call.observation for call in runner.played if call.t == t), {})
