"""Preference pairs: which can be trained on, their rows, and a replay buffer in a file.

A pair is valid for one reference only (weights and tokenizer), whose log-probabilities it has. A buffer belongs to one
reference and refuses pairs of another.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import random
import shutil
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

from ..rollouts.rollout import DpoPair, Rollout

SkipReason = Literal["equal", "empty", "too_long"]

_TUPLES = ("context_ids", "chosen_ids", "rejected_ids")


class StaleReference(ValueError):
    """Pairs have no reference log-probabilities or those of another reference; compute them again."""


class DamagedBuffer(ValueError):
    """A line of the file cannot be read and is not an incomplete last line, which a killed process may leave."""


def skip_reason(pair: DpoPair, *, max_length: int | None = None) -> SkipReason | None:
    """Return why a pair cannot be trained on; None if it can.

    Args:
        pair: Preference pair of channel 3.
        max_length: Most tokens of the context and the longer action together; None for no bound.

    Returns:
        ``equal``, both actions are the same tokens, so that their gradients cancel; ``empty``, one has none, or
        there is no context to predict its first from; ``too_long``; None if it can.
    """
    if not pair.context_ids or not pair.chosen_ids or not pair.rejected_ids:
        return "empty"
    if pair.chosen_ids == pair.rejected_ids:
        return "equal"
    if max_length is not None:
        longest = len(pair.context_ids) + max(len(pair.chosen_ids), len(pair.rejected_ids))
        if longest > max_length:
            return "too_long"
    return None


def trainable_pairs(
    pairs: Iterable[DpoPair], *, max_length: int | None = None
) -> tuple[list[DpoPair], Counter[SkipReason]]:
    """Return the pairs that can be trained on, and the number of others by reason.

    Args:
        pairs: Preference pairs of channel 3.
        max_length: Most tokens of a context and its longer action together; None for no bound.

    Returns:
        The pairs in their order; the reasons counted.
    """
    kept: list[DpoPair] = []
    skipped: Counter[SkipReason] = Counter()
    for pair in pairs:
        reason = skip_reason(pair, max_length=max_length)
        if reason is None:
            kept.append(pair)
        else:
            skipped[reason] += 1
    return kept, skipped


@dataclass(frozen=True, slots=True)
class PairRows:
    """Pairs as rows to forward: all chosen actions, then all rejected ones, in the order of the pairs.

    Attributes:
        rows: ``2P`` token sequences, each a context and an action.
        positions: ``2P`` lists of the positions that predict the action's tokens.
        target_ids: The actions' tokens, one action after the other.
        lengths: ``2P`` lengths of the actions, in tokens.
    """

    rows: list[tuple[int, ...]]
    positions: list[tuple[int, ...]]
    target_ids: list[int]
    lengths: list[int]


def action_rows(actions: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> PairRows:
    """Return the rows to forward for actions after their contexts.

    Args:
        actions: Tokens of a context, not empty, and tokens of the action after it.

    Returns:
        For `errata_trainer.channels.forward` and `errata_trainer.channels.dpo.segment_sums`.
    """
    return PairRows(
        rows=[context + action for context, action in actions],
        positions=[tuple(range(len(context) - 1, len(context) + len(action) - 1)) for context, action in actions],
        target_ids=[token for _, action in actions for token in action],
        lengths=[len(action) for _, action in actions],
    )


def pair_rows(pairs: Sequence[DpoPair]) -> PairRows:
    """Return the rows to forward for pairs.

    Args:
        pairs: P pairs that can be trained on (`skip_reason`).

    Returns:
        As `action_rows`; the first half are the chosen actions'.
    """
    chosen = [(pair.context_ids, pair.chosen_ids) for pair in pairs]
    return action_rows(chosen + [(pair.context_ids, pair.rejected_ids) for pair in pairs])


def placed(pairs: Sequence[DpoPair], rollouts: Sequence[Rollout]) -> list[tuple[DpoPair, ...]]:
    """Assign pairs to rows. A pair whose rejected action is a row's own turn goes to that row, whose forward pass then
    serves both."""
    rows: list[tuple[DpoPair, ...]] = [()] * len(rollouts)
    ids = [rollout.prompt_ids + rollout.completion_ids for rollout in rollouts]
    for number, pair in enumerate(pairs):
        rejected = pair.context_ids + pair.rejected_ids
        own = [row for row, row_ids in enumerate(ids) if row_ids[: len(rejected)] == rejected]
        place = min(own or range(len(rows)), key=lambda row: (len(rows[row]), (row - number) % len(rows)))
        rows[place] = (*rows[place], pair)
    return rows


class PairBuffer:
    """A bounded replay buffer of pairs in a JSONL file of one process.

    What `add` returned for is on disk. A kill in the middle of a write costs the line that was being written, which is
    cut off at the next open. The file holds up to twice the capacity, then it is replaced in one rename.

    Args:
        path: File of the buffer; made with its directory if missing. Its lock is the file ``path.lock``.
        capacity: Number of pairs kept, > 0; the oldest go first.
        reference: Name of the weights and tokenizer that the pairs' reference log-probabilities are of.

    Raises:
        StaleReference: The file's pairs are another reference's.
        DamagedBuffer: A line before the last cannot be read.
        BlockingIOError: Another process has the buffer open.
        ValueError: A capacity below 1.
    """

    def __init__(self, path: Path | str, *, capacity: int, reference: str) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}: at least 1")
        self.path, self.capacity, self.reference = Path(path), capacity, reference
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # its own file: the buffer's is replaced, and a lock stays with what it was taken on
        self._lock = self.path.with_name(self.path.name + ".lock").open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._pairs: deque[DpoPair] = deque(maxlen=capacity)
            self._lines = 0
            with self.path.open("ab"):
                pass
            _sync_directory(self.path.parent)
            self._load()
            self._file = self.path.open("ab", buffering=0)
        except BaseException:
            self._lock.close()
            raise

    def add(self, pairs: Iterable[DpoPair]) -> int:
        """Append pairs to the file and sync it.

        Args:
            pairs: Pairs with the log-probabilities of this buffer's reference.

        Returns:
            How many are in the buffer now.

        Raises:
            StaleReference: A pair is another reference's or has no log-probabilities; none of them is kept.
        """
        pairs = list(pairs)
        for pair in pairs:
            self._check(pair, "a pair")
        if not pairs:
            return len(self._pairs)
        _append(self._file, b"".join(map(_line, pairs)))
        self._pairs.extend(pairs)
        self._lines += len(pairs)
        if self._lines > 2 * self.capacity:
            self._compact()
        return len(self._pairs)

    def sample(self, count: int, *, seed: int) -> list[DpoPair]:
        """Return different random pairs, the same for the same seed and contents.

        Args:
            count: Number of pairs; all, shuffled, if there are fewer.
            seed: Seed of the choice, e.g. the step.

        Returns:
            Up to ``count`` pairs.
        """
        return random.Random(seed).sample(list(self._pairs), min(count, len(self._pairs)))

    @property
    def size_bytes(self) -> int:
        """Length of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    def save(self, path: Path) -> None:
        """Save the buffer's file under another path, e.g. in a checkpoint: as a hard link, or as a copy where no link
        can be made, such as on another file system.

        A linked file grows as the buffer appends to it, so keep `size_bytes` with it for `restore`.

        Args:
            path: A path in an existing directory; a file there is replaced.
        """
        new = path.with_name(f"{path.name}.new")
        new.unlink(missing_ok=True)
        try:
            os.link(self.path, new)
        except OSError:
            shutil.copyfile(self.path, new)
            with new.open("rb") as copy:
                os.fsync(copy.fileno())
        new.replace(path)  # so that a crash leaves the file that was there, or this one
        new.unlink(missing_ok=True)  # it is still there if both names were links to the buffer's file
        _sync_directory(path.parent)

    def restore(self, path: Path, size_bytes: int) -> None:
        """Replace the buffer's pairs with those of a saved file; pairs that were added since are dropped.

        Args:
            path: File written by `save`; it is not changed.
            size_bytes: Value of `size_bytes` when the file was saved.

        Raises:
            DamagedBuffer: The file is shorter, or a line cannot be read.
            StaleReference: Its pairs are another reference's.
        """
        data = path.read_bytes()[:size_bytes]
        if len(data) < size_bytes or (data and not data.endswith(b"\n")):
            raise DamagedBuffer(f"{path} does not have the {size_bytes} bytes that were saved")
        fresh = self.path.with_name(self.path.name + ".new")
        with fresh.open("wb", buffering=0) as file:
            _append(file, data)
        fresh.replace(self.path)
        _sync_directory(self.path.parent)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        self._pairs.clear()
        self._lines = 0
        self._load()

    def close(self) -> None:
        """Close the file and release the lock."""
        self._file.close()
        self._lock.close()

    def __len__(self) -> int:
        """Return the number of pairs."""
        return len(self._pairs)

    def __iter__(self) -> Iterator[DpoPair]:
        """Iterate over the pairs, oldest first."""
        return iter(self._pairs)

    def __enter__(self) -> Self:
        """Return the buffer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the buffer."""
        self.close()

    def _check(self, pair: DpoPair, what: str) -> None:
        if pair.ref_chosen is None or pair.ref_rejected is None:
            raise StaleReference(f"{what} has no reference log-probabilities: compute them before it is kept")
        if pair.reference != self.reference:
            raise StaleReference(
                f"{what} has log-probabilities of {pair.reference!r}, {self.path} is of {self.reference!r}: "
                "compute them again, or use another file"
            )

    def _load(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        lines = data[:whole].split(b"\n")[:-1]
        for number, line in enumerate(lines, 1):
            try:
                pair = _pair(line)
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines):
                    whole -= len(line) + 1
                    break
                raise DamagedBuffer(f"line {number} of {self.path} cannot be read: {error}") from error
            self._check(pair, f"line {number} of {self.path}")
            self._pairs.append(pair)
            self._lines += 1
        if whole < len(data):
            os.truncate(self.path, whole)

    def _compact(self) -> None:
        fresh = self.path.with_name(self.path.name + ".new")
        with fresh.open("wb", buffering=0) as file:
            _append(file, b"".join(map(_line, self._pairs)))
        fresh.replace(self.path)
        _sync_directory(self.path.parent)
        self._file.close()
        self._file = self.path.open("ab", buffering=0)
        self._lines = len(self._pairs)


def _line(pair: DpoPair) -> bytes:
    return json.dumps(asdict(pair), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _pair(line: bytes) -> DpoPair:
    row: dict[str, Any] = json.loads(line)
    known = {field.name for field in fields(DpoPair)}
    values: dict[str, Any] = {
        name: tuple(value) if name in _TUPLES else value for name, value in row.items() if name in known
    }
    return DpoPair(**values)


def _append(file: io.FileIO, data: bytes) -> None:
    """Append and sync all data; after an OSError the file is as long as before."""
    start, rest = os.fstat(file.fileno()).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(start)
        raise


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
