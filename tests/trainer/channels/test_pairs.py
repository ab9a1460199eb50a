"""The replay buffer: what is kept, what is refused, what a kill leaves."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from errata_trainer import DpoPair
from errata_trainer.channels.pairs import DamagedBuffer, PairBuffer, StaleReference, skip_reason, trainable_pairs

REFERENCE = "weights@1 tokenizer@2"


def pair(number: int, **changes: object) -> DpoPair:
    values: dict[str, object] = {
        "context_ids": (1, 2),
        "chosen_ids": (3, number),
        "rejected_ids": (4,),
        "ref_chosen": -1.0 / 3.0,
        "ref_rejected": -2.5,
        "reference": REFERENCE,
        "eid": "e",
        "t": number,
        "votes": {"a": "k", "b": None},
    }
    return DpoPair(**(values | changes))  # type: ignore[arg-type]


def buffer(path: Path, capacity: int = 100, reference: str = REFERENCE) -> PairBuffer:
    return PairBuffer(path / "pairs.jsonl", capacity=capacity, reference=reference)


def test_pairs_that_cannot_train_are_left_out_and_counted() -> None:
    pairs = [
        pair(0),
        pair(1, chosen_ids=(4,)),
        pair(2, chosen_ids=()),
        pair(3, context_ids=()),
        pair(4, rejected_ids=(5,) * 9),
    ]
    kept, skipped = trainable_pairs(pairs, max_length=10)
    assert kept == [pairs[0]]
    assert skipped == Counter(empty=2, equal=1, too_long=1)
    assert skip_reason(pairs[4]) is None


def test_what_was_added_is_there_after_the_next_open(tmp_path: Path) -> None:
    with buffer(tmp_path) as kept:
        assert kept.add([pair(0), pair(1)]) == 2
    with buffer(tmp_path) as again:
        assert list(again) == [pair(0), pair(1)]


def test_the_oldest_go_and_the_file_stays_bounded(tmp_path: Path) -> None:
    with buffer(tmp_path, 3) as kept:
        for number in range(20):
            kept.add([pair(number)])
            assert (tmp_path / "pairs.jsonl").read_bytes().count(b"\n") <= 6
        assert [p.t for p in kept] == [17, 18, 19]
    with buffer(tmp_path, 3) as again:
        assert [p.t for p in again] == [17, 18, 19]


def test_a_sample_is_of_different_pairs_and_goes_by_its_seed(tmp_path: Path) -> None:
    with buffer(tmp_path) as kept:
        kept.add(pair(number) for number in range(50))
        one, same, other = (kept.sample(8, seed=seed) for seed in (1, 1, 2))
        assert one == same != other
        assert len({p.t for p in one}) == 8
        assert sorted(p.t or 0 for p in kept.sample(1000, seed=1)) == list(range(50))
        assert kept.sample(0, seed=1) == []


def test_pairs_of_another_reference_or_of_none_are_refused_whole(tmp_path: Path) -> None:
    with buffer(tmp_path) as kept:
        with pytest.raises(StaleReference, match="'weights@0'"):
            kept.add([pair(0), pair(1, reference="weights@0")])
        with pytest.raises(StaleReference, match="no reference log-probabilities"):
            kept.add([pair(0, ref_rejected=None)])
        assert len(kept) == 0
        kept.add([pair(0)])
    with pytest.raises(StaleReference, match="line 1"):
        buffer(tmp_path, reference="weights@2")
    with buffer(tmp_path) as still:
        assert len(still) == 1


def test_a_torn_last_line_is_cut_off_at_any_byte(tmp_path: Path) -> None:
    with buffer(tmp_path) as kept:
        kept.add([pair(0), pair(1)])
    path = tmp_path / "pairs.jsonl"
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        with buffer(tmp_path) as again:
            assert list(again) == [pair(0)]
            again.add([pair(2)])
        with buffer(tmp_path) as later:
            assert list(later) == [pair(0), pair(2)]


def test_damage_in_the_middle_is_said(tmp_path: Path) -> None:
    with buffer(tmp_path) as kept:
        kept.add([pair(0), pair(1), pair(2)])
    path = tmp_path / "pairs.jsonl"
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(DamagedBuffer, match="line 2"):
        buffer(tmp_path)


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = buffer(tmp_path)
    kept.add([pair(0)])

    class Full(io.FileIO):
        def write(self, data: object) -> int:
            super().write(bytes(memoryview(data))[:30])  # type: ignore[arg-type]
            raise OSError(errno.ENOSPC, "No space left on device")

    real = kept._file
    kept._file = Full(kept.path, "ab")
    with pytest.raises(OSError, match="No space"):
        kept.add([pair(1)])
    kept._file.close()
    kept._file = real
    kept.add([pair(2)])
    kept.close()
    with buffer(tmp_path) as again:
        assert list(again) == [pair(0), pair(2)]


def test_one_process_has_it_at_a_time(tmp_path: Path) -> None:
    with buffer(tmp_path), pytest.raises(BlockingIOError):
        buffer(tmp_path)
    buffer(tmp_path).close()
    with pytest.raises(ValueError, match="capacity"):
        buffer(tmp_path, 0)


WRITER = """
import sys
from errata_trainer import DpoPair
from errata_trainer.channels.pairs import PairBuffer
buffer = PairBuffer(sys.argv[1], capacity=7, reference="r")
number = 0
while True:
    buffer.add([DpoPair((1,), (2,) * 400, (3,), -1.0, -1.0, "r", t=number + k) for k in range(3)])
    number += 3
    print(number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_added(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    for round_ in range(3):
        path.unlink(missing_ok=True)
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        for _ in range(5 + 4 * round_):
            line = writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        acknowledged = int(rest[-1] if rest else line)
        with PairBuffer(path, capacity=7, reference="r") as kept:
            numbers = [p.t for p in kept]
        last = numbers[-1]
        assert last is not None
        assert last + 1 >= acknowledged
        assert numbers == list(range(last - 6, last + 1))


@pytest.mark.parametrize("linked", [True, False])
def test_a_saved_file_replaces_the_one_before_it_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    def no_link(*_: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not linked:
        monkeypatch.setattr(os, "link", no_link)
    synced: list[int] = []
    sync = os.fsync
    saved, kept = tmp_path / "checkpoint.jsonl", buffer(tmp_path)
    kept.add([pair(0)])
    saved.write_bytes(b"an earlier one")
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino) or sync(descriptor))
        kept.save(saved)
    assert saved.read_bytes() == kept.path.read_bytes()
    assert (saved.stat().st_ino == kept.path.stat().st_ino) is linked
    assert linked or saved.stat().st_ino in synced
    kept.add([pair(1)])
    kept.save(saved)
    kept.save(kept.path)
    assert saved.read_bytes() == kept.path.read_bytes()
    assert not list(tmp_path.glob("*.new"))
