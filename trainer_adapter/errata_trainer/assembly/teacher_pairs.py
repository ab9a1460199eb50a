"""The pair source of channel 3: asks teachers about states of each batch in the background."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from ..channels.arguments import not_negative
from ..channels.pairs import PairBuffer, trainable_pairs
from ..channels.prm import scores_of_voted_turns
from ..episodes.playing import Episode
from ..launch import of_this_process
from ..rollouts.rollout import DpoPair, Rollout
from ..teachers import Action, Ask, Ballot, Batch, Spend, TeacherPool, ToolCall, ask_of, choose, message_of, preferences
from ..teachers.states import Policy
from .action_tokens import ActionTokens
from .batch import Transcripts
from .pair_source import Margins, PairSource, Referred, Votes

log = logging.getLogger("errata.trainer")

PAIRS_FILE = "errata_pairs.jsonl"
"""In a checkpoint: the pairs of this process; with several processes ``errata_pairs.rank3.jsonl``."""

_ASKS: TypeAdapter[list[Ask]] = TypeAdapter(list[Ask])


@dataclass(frozen=True, slots=True)
class _Asked:
    """Token ids of a state that was asked about."""

    context_ids: tuple[int, ...]
    turn_ids: tuple[int, ...]


class TeacherPairs(PairSource):
    """Asks a pool of teachers about each batch, and makes pairs of what they agree on, for this or a later batch.

    Args:
        pool: The teachers. The caller closes it.
        buffer: File of the replay buffer; pairs outlive a killed trainer. Where several processes train together, each
            has a file of its own: ``pairs.jsonl`` is ``pairs.rank3.jsonl`` on rank 3.
        policy: Choice of the states that teachers are asked about.
        most_states: Most states of one batch that are asked about.
        capacity: Most pairs that are kept.
        max_length: Most tokens of a pair's context and action; None for no bound.
        wait_s: Longest wait, in seconds, for a batch's own votes before it is trained on; 0 does not wait.
        seed: Seed of the draws from the buffer.
        scores: Function from a batch's rollouts to a score of each turn, or None for a turn without one; the policy
            ``value_gap`` needs it.
        nll: Weight of the chosen action's negative log-likelihood per token beside DPO's loss, where the recipe's
            settings do not say otherwise: what teachers agreed on is also to become likely (RPO's value).

    Raises:
        ValueError: The policy needs scores, or ``nll`` is negative.

    Attributes:
        margins: Margins of the ballots that came with the last `sample`, by episode, delivery and turn.
        votes: Votes that came with the last `sample`, by episode and delivery.
        counts: Votes by their reason, and pairs that were left out by theirs (``equal``, ``empty``, ``too_long``,
            ``not_rendered``, ``no_tokens``; ``no_action``, the student was cut off in its reasoning); ``no_logprobs``,
            rollouts that the policy ``entropy`` could not look at; ``not_waited_for``, batches whose votes were not
            there after ``wait_s``.
    """

    def __init__(
        self,
        pool: TeacherPool,
        buffer: Path | str,
        *,
        policy: Policy = "error_sites",
        most_states: int = 16,
        capacity: int = 4096,
        max_length: int | None = None,
        wait_s: float = 0.0,
        seed: int = 0,
        scores: Callable[[Sequence[Rollout]], Sequence[Sequence[float | None]]] | None = None,
        nll: float = 1.0,
    ) -> None:
        not_negative("nll", nll)
        if policy == "value_gap" and scores is None:
            raise ValueError("value_gap needs scores: give scores=, a function from rollouts to a score of each turn")
        self.scores, self.nll = scores, nll
        self.pool = pool
        self.policy, self.most_states = policy, most_states
        self.max_length, self.wait_s = max_length, wait_s
        self.counts: Counter[str] = Counter()
        self._path, self._capacity = of_this_process(Path(buffer)), capacity
        self._buffer: PairBuffer | None = None
        self._waiting: list[tuple[Batch, list[_Asked]]] = []
        self.margins: Margins = {}
        self.votes: Votes = {}
        self.waits = wait_s > 0
        self.needs_logprobs = policy == "entropy" and scores is None
        self._seed = seed
        self._draws = self._restored_bytes = 0
        self._tokens: ActionTokens | None = None
        self._end_ids: frozenset[int] = frozenset()

    def use(self, tokenizer: Any, end_ids: Sequence[int], reference: str, **template: Any) -> None:
        """Take the student's tokenizer and chat template from the trainer, and open the buffer.

        Args:
            tokenizer: Tokenizer of the student.
            end_ids: Tokens that end a turn.
            reference: Name of the reference model, whose log-probabilities pairs have.
            **template: Arguments of ``apply_chat_template``.

        Raises:
            StaleReference: The buffer holds pairs of another reference.
            ValueError: The student's chat template does not render a teacher's call: no vote could become a pair.
        """
        tokens = ActionTokens(tokenizer, end_ids, **template)
        try:
            tokens.other(message_of(Action((ToolCall("tool", {"argument": "value"}),))))
        except ValueError as error:
            raise ValueError(f"channel 3 cannot use this student: {error}; pass pairs=None") from error
        self.close()
        self._buffer = PairBuffer(self._path, capacity=self._capacity, reference=reference)
        if self.pool is not None:
            self.pool.budget.keep_in(self._spent_file)
        self._end_ids = frozenset(end_ids)
        self._tokens = tokens

    def observe(self, rollouts: Sequence[Rollout], runners: Sequence[Episode | None], transcripts: Transcripts) -> None:
        """Submit states of a batch to the teachers."""
        asks, known = [], []
        scores = self.scores(rollouts) if self.scores is not None else None
        if self.policy == "entropy" and scores is None:
            self.counts["no_logprobs"] += sum(one.logprobs is None and one.lost is None for one in rollouts)
        for site in choose(rollouts, self.policy, scores=scores, most=self.most_states):
            rollout, row = rollouts[site.rollout], site.rollout
            messages = transcripts.messages[row]
            assistant_messages = [
                number for number, message in enumerate(messages) if message.get("role") == "assistant"
            ]
            if site.turn.index >= len(assistant_messages):
                self.counts["no_tokens"] += 1
                continue
            before = messages[: assistant_messages[site.turn.index]]
            prompt = transcripts.prompts[row]
            text = messages[assistant_messages[site.turn.index]].get("content") or ""
            own_prompt = before_the_episode(prompt, runners[row])
            asks.append(ask_of(site, rollout, text=str(text), prompt=own_prompt, transcript=[*prompt, *before]))
            known.append(
                _Asked(
                    rollout.prompt_ids + rollout.completion_ids[: site.turn.start],
                    rollout.completion_ids[site.turn.start : site.turn.stop],
                )
            )
        if asks:
            self._waiting.append((self.pool.submit(asks), known))

    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        """Add pairs from the votes that have come to the buffer, and draw up to ``count`` pairs from it."""
        if self.wait_s > 0 and self._waiting:
            try:
                self._waiting[-1][0].result(self.wait_s)
            except TimeoutError:
                self.counts["not_waited_for"] += 1
        done = [entry for entry in self._waiting if entry[0].done]
        self._waiting = [entry for entry in self._waiting if not entry[0].done]
        found: list[DpoPair] = []
        margins: dict[tuple[str, int, int], float] = {}
        votes: dict[tuple[str, int], Mapping[str, str | None]] = {}
        for batch, known in done:
            ballots = batch.result(0.0)
            margins |= scores_of_voted_turns(ballots)
            for ballot, asked in zip(ballots, known, strict=True):
                self.counts[ballot.vote.reason] += 1
                if ballot.votes and ballot.ask.eid is not None and ballot.ask.t is not None:
                    votes[ballot.ask.eid, ballot.ask.t] = ballot.votes
                found += self._pairs(ballot, asked)
        self.margins, self.votes = margins, votes
        kept, skipped = trainable_pairs(found, max_length=self.max_length)
        self.counts.update({str(reason): number for reason, number in skipped.items()})
        if self._buffer is None:
            raise RuntimeError("call use() before sample(): it takes the student's tokenizer and opens the buffer")
        self._buffer.add(referred(kept))
        self._draws += 1
        return self._buffer.sample(min(count, len(self._buffer)), seed=self._seed + self._draws)

    def _pairs(self, ballot: Ballot, asked: _Asked) -> list[DpoPair]:
        if self._tokens is None:
            raise RuntimeError("call use() before sample(): it takes the student's tokenizer")
        made = []
        for preference in preferences(ballot):
            own = self._tokens.own(asked.turn_ids, call=bool(preference.chosen.calls))
            if own is None:
                self.counts["no_action"] += 1
                continue
            try:
                chosen = self._tokens.other(message_of(preference.chosen), own.lead)
            except ValueError:
                self.counts["not_rendered"] += 1
                continue
            rejected = asked.turn_ids[own.start :]
            if not rejected or rejected[-1] not in self._end_ids:  # it was cut off: neither side has its end
                chosen = chosen[:-1] if chosen and chosen[-1] in self._end_ids else chosen
            made.append(
                DpoPair(
                    asked.context_ids + asked.turn_ids[: own.start],
                    chosen,
                    rejected,
                    weight=preference.weight,
                    eid=preference.eid,
                    t=preference.t,
                    votes=dict(preference.votes),
                )
            )
        return made

    def metrics(self) -> dict[str, float]:
        """Return counts since the start, the metrics of the pool, and the size of the buffer.

        ``votes/REASON``, an entry of `counts`; ``pool/NAME``, a metric of the pool; ``buffer``, pairs in the buffer.
        """
        found = {f"votes/{reason}": float(number) for reason, number in sorted(self.counts.items())}
        found |= {f"pool/{name}": value for name, value in self.pool.metrics().items()}
        return {**found, "buffer": float(len(self._buffer)) if self._buffer is not None else 0.0}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, ready for JSON: counters, the budget's spending, unanswered questions.

        The pairs themselves are saved by `save_files`.
        """
        spent = self.pool.budget.spent if self.pool is not None else Spend()
        return {
            "draws": self._draws,
            "counts": dict(self.counts),
            "buffer_bytes": self._buffer.size_bytes if self._buffer is not None else 0,
            "spent": {"usd": spent.usd, "tokens": spent.tokens},
            "waiting": [
                {"asks": _ASKS.dump_python(list(batch.asks), mode="json"), "tokens": [asdict(one) for one in known]}
                for batch, known in self._waiting
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. Questions that were in flight are asked again; answers in the cache are free."""
        self._draws, self.counts = int(state["draws"]), Counter(state["counts"])
        self._restored_bytes = int(state.get("buffer_bytes", 0))
        if self.pool is not None and "spent" in state:
            self.pool.budget.resume(Spend(**state["spent"]))
            self.pool.budget.resume_from(self._spent_file)  # what was spent after the checkpoint
        for batch in state.get("waiting", ()):
            known = [_Asked(tuple(one["context_ids"]), tuple(one["turn_ids"])) for one in batch["tokens"]]
            self._waiting.append((self.pool.submit(_ASKS.validate_python(batch["asks"])), known))

    @property
    def _spent_file(self) -> Path:
        return self._path.with_suffix(".spent.json")

    def save_files(self, directory: Path) -> None:
        """Save the buffer's pairs in a checkpoint's directory."""
        if self._buffer is not None:
            self._buffer.save(of_this_process(directory / PAIRS_FILE))

    def load_files(self, directory: Path) -> None:
        """Replace the buffer's pairs with those of a checkpoint, so that draws are those of an uninterrupted run.

        The buffer's file is replaced too. Pairs that were added after the checkpoint are dropped: the resumed run makes
        them again. `load_state_dict` has to be called first, as it sets how many bytes of the checkpoint's file are
        read; without it the buffer is empty afterwards. If the buffer is not open, or the checkpoint has no pairs of
        this process, this logs a warning and changes nothing.

        Args:
            directory: Directory of the checkpoint, in which `save_files` saved the pairs.

        Raises:
            DamagedBuffer: The checkpoint's file is shorter than when it was saved, or a line in it cannot be read.
            StaleReference: The checkpoint's file has pairs of another reference than that of `use`.
        """
        if self._buffer is None:
            log.warning("pairs are not loaded from %s: the buffer is not open, call use() first", directory)
            return
        path = of_this_process(directory / PAIRS_FILE)
        if not path.is_file():
            log.warning("%s has no %s: draws of pairs differ from those of an uninterrupted run", directory, path.name)
            return
        self._buffer.restore(path, self._restored_bytes)

    def close(self) -> None:
        """Close the buffer, not the pool. Idempotent."""
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def before_the_episode(prompt: Sequence[Mapping[str, Any]], runner: Episode | None) -> list[Mapping[str, Any]]:
    """Return a prompt without the text of ``reset``, which TRL appends to the last message and the journal has as
    t=0."""
    messages = list(prompt)
    opening = runner.environment.agent_text(runner.opening) if runner is not None and runner.opening else ""
    content = messages[-1].get("content") if messages else None
    if opening and isinstance(content, str) and content.endswith(opening):
        rest = content.removesuffix(opening)
        messages[-1:] = [{**messages[-1], "content": rest}] if rest.strip() else []
    return messages
