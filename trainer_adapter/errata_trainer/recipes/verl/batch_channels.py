"""Channels 2 and 3 of one batch after the other, in the process of VeRL's trainer: sites, hints, pairs, votes, columns.

Nothing here knows Ray or the transfer queue: the trainer hands over `Row` records and puts the columns that it gets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...assembly.channel_set import driver_for
from ...assembly.checkpoints import ChannelState
from ...assembly.collator import votes_of_turns
from ...assembly.counterfactual import Calls, CounterfactualCheck, acceptance
from ...assembly.driver import ChannelDriver
from ...assembly.preferences import rejected_here
from ...channels.prm import shaped_advantages
from ...channels.schedules import has_weight, weight_at
from ...episodes.playing import worth_a_look
from ...episodes.tools import schema_of
from ...monitoring.completions import EID, completion_table, described, marked_turns
from ...monitoring.metrics import Metrics
from ...monitoring.watch import Watch
from ...rollouts.rollout import DpoPair, Rollout, SdpoItem
from .agent_loop import Played
from .options import ChannelOptions
from .records import Row, read_rows


class RolloutServer(Protocol):
    """The rollout servers, beside rollouts: `errata_trainer.recipes.verl.scoring.Scorer`.

    Attributes:
        unscored: Number of error sites that could not be scored, by reason.
        unsampled: Number of contexts after which no turn could be sampled, by reason.
    """

    unscored: Counter[str]
    unsampled: Counter[str]

    def score(self, items: Sequence[SdpoItem]) -> list[list[float] | None]:
        """Return the teacher's log-probabilities of the targets of each error site; None for one that has none."""
        ...

    def sample(self, contexts: Sequence[Sequence[int]]) -> list[Calls | None]:
        """Return the calls of one turn of the student after each context; None where it took none."""
        ...


@dataclass(slots=True)
class RowChannels:
    """What channels 2 and 3 have of one row.

    Attributes:
        rollout: The row's rollout.
        prompt: Messages of the prompt.
        messages: Messages of the response.
        items: Error sites to distil.
        logprobs: Teacher's log-probabilities of the targets of each of ``items``, where the rollout server gives them;
            None for a site that was not scored.
        pairs: Pairs that stand in the row.
        own: Whether the rejected action of each of ``pairs`` is in the row itself.
        turn_scores: Consensus score of each response token, 0 where nobody voted; None without votes.
        teacher_actions: Key of each teacher's action at the state of a turn, by the turn's index in the rollout.
    """

    rollout: Rollout
    prompt: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    items: tuple[SdpoItem, ...] = ()
    logprobs: tuple[list[float] | None, ...] = ()
    pairs: tuple[DpoPair, ...] = ()
    own: tuple[bool, ...] = ()
    turn_scores: list[float] | None = None
    teacher_actions: dict[int, dict[str, str | None]] = field(default_factory=dict)


class BatchChannels:
    """Finds what channels 2 and 3 train on in each batch of VeRL's trainer.

    Args:
        options: Options of the channels.
        played: Environment that is played, with its tools.
        tokenizer: Tokenizer of the student.
        end_ids: Tokens that end a turn.
        model_config: Configuration of the student, which bounds the teacher's rows; None for no bound.
        scorer: The rollout servers.
        referred: Function that gives pairs the log-probabilities of the reference.
        reference: Name of the reference; see `errata_trainer.assembly.channel_set.reference_name`.
        has_logprobs: Whether rollouts have log-probabilities of their tokens.
        steps: Number of steps of the run.

    Attributes:
        steps: Number of steps of the run.
        metrics: Metrics of this process.
        driver: Driver of the channels.
        watch: Watch over the logged metrics of channel 2.
        state: State of the channels in this process, which is saved with a checkpoint.
        lost: Number of rollouts that were lost since the last step, by reason.
        failed: Number of batches and workers that were lost, and of groups of one, since the last step, by metric.
        eid: Key of an episode of the last batch to look at; None for none.

    Raises:
        ValueError: An option does not fit the tokenizer, or another option.
    """

    def __init__(
        self,
        options: ChannelOptions,
        played: Played,
        *,
        tokenizer: Any,
        end_ids: Sequence[int],
        model_config: Any | None,
        scorer: RolloutServer,
        referred: Callable[[Sequence[DpoPair]], list[DpoPair]],
        reference: str,
        has_logprobs: bool,
        steps: int,
    ) -> None:
        self.options, self._played, self._scorer = options, played, scorer
        self._referred = referred if options.compares else _without_pairs
        self.steps = steps
        pairs = options.pairs
        if options.form == "estimator" and pairs is not None and (pairs.margins is None or not pairs.waits):
            raise ValueError(
                "errata.channels.form=estimator needs votes on the batch itself: give TeacherPairs wait_s= (seconds)"
            )
        self.metrics = Metrics()
        self._check = options.check or CounterfactualCheck()
        self.driver: ChannelDriver = driver_for(
            options.settings,
            tokenizer=tokenizer,
            end_ids=end_ids,
            pad_ids=[tokenizer.pad_token_id],
            tools=[schema_of(played.environment.tools[name]) for name in played.tools],
            model_config=model_config,
            distilling=options.alpha_sdpo != 0,
            hinter=options.hinter,
            check=self._check,
            pairs=pairs,
            reference=reference,
            has_logprobs=has_logprobs,
            metrics=self.metrics,
        )
        self.watch = Watch(lower_dose=options.settings.lower_dose)
        self.state = ChannelState(
            {"watch": self.watch, "check": options.check, "pairs": options.pairs, "hinter": options.hinter}
        )
        self.lost: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.eid: str | None = None
        self._rows: dict[str, RowChannels] = {}

    # Weights

    def alpha(self, step: int) -> float:
        """Return the weight of channel 2 at a step, from 0, with the dose of the watch."""
        return self.watch.dose * weight_at(self.options.alpha_sdpo, step)

    def beta(self, step: int) -> float:
        """Return the weight of channel 3 at a step, from 0."""
        return weight_at(self.options.beta_replay, step) if self.driver.pair_source is not None else 0.0

    @property
    def scores_turns(self) -> bool:
        """Whether the teachers' consensus is added to advantages."""
        shaped = self.options.form == "estimator" or self.options.settings.prm_weight != 0.0
        return shaped and self.driver.pair_source is not None

    # The batch

    def read(self, rows: Sequence[Row], step: int) -> None:
        """Take a batch: find its error sites and pairs, and ask the teachers. Rollout servers are awake.

        Args:
            rows: Rows of the batch.
            step: Steps that were made before.
        """
        self._rows, options = {}, self.options
        transcripts, episodes = read_rows(rows, self._played.environment, self._played.connect)
        self.eid = worth_a_look([episode for episode in episodes if episode is not None])
        rollouts = self.driver.rollouts(transcripts, episodes)
        self._count(rows, rollouts)
        found = [
            RowChannels(rollout, prompt, messages)
            for rollout, prompt, messages in zip(rollouts, transcripts.prompts, transcripts.messages, strict=True)
        ]
        distilling = weight_at(options.alpha_sdpo, step) != 0
        if distilling:
            self._add_sites(rows, rollouts, episodes, found)
        # Teachers are asked as soon as channel 3 may ever have a weight: their answers take a while.
        later = range(step, max(self.steps, step + 1))
        if self.driver.pair_source is not None and (has_weight(options.beta_replay, later) or self.scores_turns):
            self.driver.ask(rollouts, episodes, transcripts)
            self._add_pairs(rollouts, found, step)
        self._rows = {row.key: one for row, one in zip(rows, found, strict=True)}

    def _add_sites(
        self, rows: Sequence[Row], rollouts: list[Rollout], episodes: Sequence[Any], found: list[RowChannels]
    ) -> None:
        trained = [any(row.mask) for row in rows]
        groups = [row.group for row in rows]
        of_rows = self.driver.items(rollouts, episodes, sample=self._scorer.sample, trained=trained, groups=groups)
        for one, items in zip(found, of_rows, strict=True):
            one.items = items
        if self.options.form == "estimator":
            scores = iter(self._scorer.score([item for items in of_rows for item in items]))
            for one in found:
                one.logprobs = tuple(next(scores) for _ in one.items)
            unscored = sum(logprobs is None for one in found for logprobs in one.logprobs)
            self.metrics.batch("sdpo/not_scored", unscored)
        for name, counts in (("not_scored", self._scorer.unscored), ("not_tried", self._scorer.unsampled)):
            for reason, count in counts.items():
                self.metrics.running(f"sdpo/{name}/{reason}", count)

    def _add_pairs(self, rollouts: list[Rollout], found: list[RowChannels], step: int) -> None:
        comparing = self.options.form == "loss" and self.beta(step) != 0
        if comparing or self.scores_turns:  # the votes come with the pairs, also where no pair is used
            count = self.options.settings.pairs_per_batch if comparing else 0
            of_rows = self.driver.pairs(count, rollouts, self._referred)
            for one, pairs in zip(found, of_rows, strict=True):
                trained = any(one.rollout.mask)
                one.pairs, one.own = pairs, rejected_here(pairs, one.rollout, trained=trained)
                one.teacher_actions = votes_of_turns(one.rollout, self.driver.votes)
        if self.scores_turns:
            added = shaped_advantages(rollouts, self.driver.turn_scores(rollouts))
            for one, scores in zip(found, added, strict=True):
                one.turn_scores = scores[: len(one.rollout.completion_ids)].tolist()

    def of_row(self, key: str) -> RowChannels:
        """Return what the channels have of a row; an empty record for one with which VeRL filled the batch up."""
        return self._rows.get(key) or RowChannels(Rollout((), (), ()), [], [])

    # Metrics

    def _count(self, rows: Sequence[Row], rollouts: Sequence[Rollout]) -> None:
        groups: defaultdict[str, list[float]] = defaultdict(list)
        for row, rollout in zip(rows, rollouts, strict=True):
            if rollout.reward is not None:
                groups[row.group].append(rollout.reward)
        rewards = [reward for of_group in groups.values() for reward in of_group]
        self.metrics.mean("reward", sum(rewards), len(rewards))
        same = sum(len(set(of_group)) == 1 for of_group in groups.values())
        self.metrics.mean("frac_reward_zero_std", same, len(groups))

    def count_lost(self, lost: Counter[str]) -> None:
        """Add rollouts that were lost, by reason."""
        self.lost.update(lost)

    def count_failed(self, name: str, number: float) -> None:
        """Add to the number of batches, workers or groups that failed; a step may have several batches."""
        self.failed[name] += int(number)

    def taken_lost(self, played: int) -> dict[str, float]:
        """Return the metrics of what was lost since the last call.

        Args:
            played: Number of rollouts that were not lost.
        """
        lost, self.lost = self.lost, Counter()
        failed, self.failed = self.failed, Counter()
        count = sum(lost.values())
        found = {f"episodes/lost/{reason}": float(number) for reason, number in sorted(lost.items())}
        found |= {name: float(number) for name, number in failed.items()}
        return {"episodes/lost": count / max(1, count + played), **found}

    def acceptance(self) -> dict[str, float]:
        """Return the metrics of the counterfactual check; none where it is off."""
        return acceptance(self._check.counts) if self._check.mode != "off" else {}

    def table(self, advantages: dict[str, float], *, step: int, most: int | None, below: Sequence[str]) -> Any:
        """Return the table of the last batch's completions, for rich to print.

        Args:
            advantages: Mean advantage of the sampled tokens of each row, by its key.
            step: Number of the step.
            most: Most completions to show; None for all.
            below: Lines below the table.
        """
        shown = list(self._rows.values())
        marked = [marked_turns(one.rollout) for one in shown]
        return completion_table(
            [one.prompt for one in shown],
            [one.messages for one in shown],
            {"reward": [one.rollout.reward for one in shown]},
            [advantages.get(key, 0.0) for key in self._rows],
            marked,
            step=step,
            most=most,
            extra={
                "errors": [described(turns) for turns in marked],
                EID: [one.rollout.eid or "" for one in shown],
            },
            below=below,
            viewers=[self._played.viewer for _ in shown],
        )


def _without_pairs(pairs: Sequence[DpoPair]) -> list[DpoPair]:
    """Return no pairs: their votes are used, and no reference is there that they could be compared with."""
    return []
