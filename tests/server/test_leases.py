"""Leases: a shard has one owner at a time, whatever clocks, registries and lease files do (decision 210)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from errata_protocol.errors import JournalUnavailable
from errata_server.runtime import lease as lease_module
from errata_server.runtime.lease import Lease, LeaseWriter, now_ns
from errata_server.runtime.leases import Grant, Leases, Wait

LEASE_S, DRIFT = 10.0, 0.1


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def leases(clock: Clock) -> Leases:
    """The leases of a registry that has been there for longer than a lease."""
    made = Leases(lease_s=LEASE_S, drift=DRIFT, clock=clock)
    clock.now += LEASE_S * (1 + DRIFT)
    return made


def test_a_free_shard_is_granted_at_once(leases: Leases) -> None:
    assert leases.take("s", "a") == Grant(1, LEASE_S)
    assert leases.take("t", "b", at_least=41) == Grant(42, LEASE_S)


def test_another_holder_waits_for_the_lease_and_the_drift(leases: Leases, clock: Clock) -> None:
    leases.take("s", "a")
    assert leases.take("s", "b") == Wait(11.0)
    clock.now += 10.5
    assert leases.renew("s", "a", 1)
    clock.now += 10.5
    assert leases.take("s", "b") == Wait(0.5)
    clock.now += 0.5
    assert leases.take("s", "b") == Grant(2, LEASE_S)


def test_who_was_followed_renews_nothing(leases: Leases, clock: Clock) -> None:
    leases.take("s", "a")
    clock.now += 11
    leases.take("s", "b")
    assert not leases.renew("s", "a", 1) and not leases.renew("s", "a", 2) and not leases.renew("s", "b", 1)
    assert leases.take("s", "a") == Wait(11.0)
    leases.release("s", "a", 1)
    assert leases.renew("s", "b", 2)


def test_a_lease_that_ran_out_is_renewed_if_nobody_took_the_shard(leases: Leases, clock: Clock) -> None:
    leases.take("s", "a")
    clock.now += 1000
    assert leases.renew("s", "a", 1)
    assert leases.take("s", "b") == Wait(11.0)


def test_a_holder_that_asks_again_keeps_its_epoch(leases: Leases, clock: Clock) -> None:
    assert leases.take("s", "a") == leases.take("s", "a") == Grant(1, LEASE_S)
    assert leases.take("s", "a", at_least=1) == Grant(2, LEASE_S), "the directory shows an epoch as high"


def test_a_shard_that_was_given_back_is_free(leases: Leases) -> None:
    leases.take("s", "a")
    leases.release("s", "a", 1)
    assert not leases.renew("s", "a", 1)
    assert leases.take("s", "b") == Grant(2, LEASE_S)


def test_a_new_registry_grants_nothing_until_the_leases_before_it_have_run_out(clock: Clock) -> None:
    leases = Leases(lease_s=LEASE_S, drift=DRIFT, clock=clock, after=1_700_000_000)
    assert leases.take("s", "a") == Wait(11.0)
    assert not leases.renew("s", "a", 3), "it cannot know whether somebody followed"
    clock.now += 11
    assert leases.take("s", "a") == Grant(1_700_000_001, LEASE_S)


def test_a_registry_that_was_kept_renews_for_its_holders_alone(leases: Leases, clock: Clock) -> None:
    leases.take("s", "a")
    leases.take("t", "b")
    leases.release("t", "b", 1)
    assert leases.held() == {"s": ("a", 1)}
    after = Leases(lease_s=LEASE_S, drift=DRIFT, clock=clock, held=leases.held())
    assert after.take("s", "b") == Wait(11.0) and after.take("t", "b") == Wait(11.0)
    assert not after.renew("s", "b", 1) and not after.renew("s", "a", 0)
    assert after.renew("s", "a", 1) and after.take("s", "a") == Grant(1, LEASE_S)


class Box:
    """A box with a clock of its own; messages to the registry take time, and some are lost."""

    def __init__(self, name: str, chance: random.Random) -> None:
        self.name, self.chance = name, chance
        self.rate = chance.uniform(1 - DRIFT / 2.1, 1 + DRIFT / 2.1)
        self.shift = chance.uniform(-1000, 1000)
        self.epoch, self.until = 0, float("-inf")

    def own(self, now: float) -> float:
        return now * self.rate + self.shift

    def holds(self, now: float) -> bool:
        return self.own(now) < self.until


def play(seed: int, drift: float) -> tuple[list[int], int]:
    """Let three boxes ask for one shard; return the epochs that they got, and how often two held it at one time."""
    chance, now, clock, both, started = random.Random(seed), 0.0, Clock(), 0, 0
    rate = chance.uniform(1 - DRIFT / 2.1, 1 + DRIFT / 2.1)
    boxes = [Box(name, chance) for name in "abc"]
    leases = Leases(lease_s=LEASE_S, drift=drift, clock=clock)
    epochs: list[int] = []
    for _ in range(2000):
        now += chance.expovariate(1.0)
        clock.now = now * rate
        if chance.random() < 0.005:  # the registry ends, and another begins that knows nothing
            started += 100
            leases = Leases(lease_s=LEASE_S, drift=drift, clock=clock, after=started)
        box = chance.choice(boxes)
        asked = box.own(now)
        now += chance.expovariate(2.0)  # on its way
        clock.now = now * rate
        if box.epoch and chance.random() < 0.9:
            if not leases.renew("s", box.name, box.epoch):
                box.epoch = 0
                continue
            granted: Grant | Wait = Grant(box.epoch, LEASE_S)
        else:
            granted = leases.take("s", box.name)
        if isinstance(granted, Wait) or chance.random() < 0.3:  # the answer is lost
            continue
        if granted.epoch != box.epoch:
            epochs.append(granted.epoch)
        box.epoch, box.until = granted.epoch, asked + granted.lease_s
        both += sum(one.holds(now) for one in boxes) > 1
    return epochs, both


@pytest.mark.parametrize("seed", range(40))
def test_no_two_boxes_hold_a_shard_at_one_time(seed: int) -> None:
    epochs, both = play(seed, DRIFT)
    assert both == 0 and len(epochs) > 10 and epochs == sorted(set(epochs)), "epochs only grow"


def test_a_registry_that_waits_too_short_lets_two_hold_a_shard() -> None:
    assert sum(play(seed, -0.3)[1] for seed in range(40)) > 10, "the test above would notice"


# -- the file --------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lease"


def test_a_lease_is_valid_until_its_time(path: Path) -> None:
    writer = LeaseWriter(path)
    writer.grant(7, now_ns() + 3_600_000_000_000)
    lease = Lease(path)
    assert lease.epoch == 7 and lease.is_valid() and not lease.is_lost() and 3500 < lease.left_s() <= 3600
    writer.grant(7, now_ns() - 1)
    assert not lease.is_valid() and not lease.is_lost() and lease.left_s() == 0
    writer.grant(7, now_ns() + 3_600_000_000_000)
    assert lease.is_valid(), "the keeper renewed it"
    assert path.stat().st_size == 24 and path.stat().st_mode & 0o777 == 0o600


def test_a_lease_of_another_epoch_is_another_servers(path: Path) -> None:
    writer = LeaseWriter(path)
    writer.grant(7, now_ns() + 3_600_000_000_000)
    lease = Lease(path)
    writer.grant(8, now_ns() + 3_600_000_000_000)
    assert not lease.is_valid() and lease.is_lost() and lease.left_s() == 0
    assert Lease(path).epoch == 8


def test_a_value_that_is_half_written_is_no_lease(path: Path) -> None:
    writer = LeaseWriter(path)
    writer.grant(7, now_ns() + 3_600_000_000_000)
    lease, whole = Lease(path), path.read_bytes()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff" * 8)  # a deadline without its checksum
    assert not lease.is_valid() and not lease.is_lost()
    path.open("r+b").write(whole)
    assert lease.is_valid()


def test_a_lease_of_an_earlier_boot_is_none(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(lease_module, "_boot", lambda: 12345)
        LeaseWriter(path).grant(7, now_ns() + 3_600_000_000_000)
    with pytest.raises(JournalUnavailable, match="no lease of this boot"):
        Lease(path)


def test_a_new_writer_keeps_what_the_file_says(path: Path) -> None:
    LeaseWriter(path).grant(7, now_ns() + 3_600_000_000_000)
    LeaseWriter(path).close()
    assert Lease(path).is_valid()


@pytest.mark.parametrize("made", ["missing", "empty", "zeros", "long", "fifo", "directory"])
def test_what_is_no_lease_is_refused(path: Path, made: str) -> None:
    match made:
        case "empty":
            path.touch()
        case "zeros":
            path.write_bytes(bytes(24))
        case "long":
            path.write_bytes(bytes(25))
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
    with pytest.raises(JournalUnavailable, match="lease"):
        Lease(path)
