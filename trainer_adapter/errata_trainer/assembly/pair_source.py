"""`PairSource`: what supplies the preference pairs of channel 3."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from ..channels.pairs import trainable_pairs
from ..episodes.playing import Episode
from ..rollouts.rollout import DpoPair, Rollout
from .batch import Transcripts

Referred = Callable[[Sequence[DpoPair]], list[DpoPair]]
"""Returns new pairs with the log-probabilities of the reference."""

Votes = Mapping[tuple[str, int], Mapping[str, str | None]]
"""Key of each teacher's action at a state, None for a teacher without one, by episode and delivery."""

Margins = Mapping[tuple[str, int, int], float]
"""The teachers' score of a turn, in [-1, 1], by episode, delivery and turn (`errata_trainer.channels.prm`)."""


class PairSource(Protocol):
    """Supplies the preference pairs of channel 3.

    A class that has it as its base needs `sample` only; everything else has the default that stands here.

    Attributes:
        nll: Weight of the chosen action's negative log-likelihood per token beside DPO's loss, where
            `ChannelSettings.dpo_nll` is None.
        margins: Margins of the votes that came with the last `sample`; None for a source that has no votes.
        votes: The votes that came with the last `sample`.
        waits: Whether `sample` waits for the votes on the batch that was observed last.
        needs_logprobs: Whether `observe` needs the log-probabilities of sampled tokens.
    """

    nll: float = 0.0
    margins: Margins | None = None
    votes: Votes = MappingProxyType({})
    waits: bool = False
    needs_logprobs: bool = False

    def use(self, tokenizer: Any, end_ids: Sequence[int], reference: str, **template: Any) -> None:
        """Receive the student's tokenizer and the name of the reference. Called once, before training.

        Args:
            tokenizer: Tokenizer of the student.
            end_ids: Tokens that end a turn.
            reference: Name of the reference model; stored pairs of another one must not be used.
            **template: Arguments of the student's ``apply_chat_template``.
        """
        return

    def observe(self, rollouts: Sequence[Rollout], runners: Sequence[Episode | None], transcripts: Transcripts) -> None:
        """Take a batch, e.g. to start asking teachers. It must not block.

        Args:
            rollouts: The batch's rollouts, B in all.
            runners: Runner of each rollout's episode; None for a row that was not played here.
            transcripts: The batch as the trainer has it.
        """
        return

    @abstractmethod
    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        """Return pairs to train on.

        Args:
            count: Most pairs to return.
            referred: Adds the reference's log-probabilities to new pairs. It has to be called exactly once, without
                pairs too: over shards of a model that is a pass of all ranks.
        """

    def metrics(self) -> dict[str, float]:
        """Return metrics to log: counts since the start."""
        return {}


class RecordedPairs(PairSource):
    """Supplies the same pairs for every batch, e.g. those of a file. It needs no teachers.

    Args:
        pairs: The pairs, the most important ones first.
        max_length: Most tokens of a pair's context and action; None for no bound.

    Attributes:
        skipped: Number of pairs that cannot be trained on, by reason.
    """

    def __init__(self, pairs: Sequence[DpoPair], *, max_length: int | None = None) -> None:
        self._pairs, self.skipped = trainable_pairs(pairs, max_length=max_length)

    def sample(self, count: int, referred: Referred) -> list[DpoPair]:
        """Return the first ``count`` pairs."""
        return referred(self._pairs[:count])

    def metrics(self) -> dict[str, float]:
        """Return the number of pairs, as ``recorded``."""
        return {"recorded": float(len(self._pairs))}
