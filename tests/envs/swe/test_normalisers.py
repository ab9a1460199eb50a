"""Normalisers: two equal runs have one semantic digest, and one character of the outcome gives another."""

from __future__ import annotations

import json
import re

import pytest

from errata_protocol.errors import InvalidRequest
from errata_protocol.normalisers import NORMALISERS, PREFIX
from errata_protocol.payload import encode_payload, semantic_digest
from errata_server.environments.volatile_fields import field_names, resolved, written_by_class
from swe_bench_lite_env.models import SweObservation

ALL = tuple(PREFIX + name for name in NORMALISERS)
RUN = """\
============================= test session starts ==============================
random seed:        {seed}
hash randomization: on (PYTHONHASHSEED={seed})
Using --randomly-seed={seed}
rootdir: /tmp/pytest-of-agent/pytest-{run}/test_a0
tests/test_a.py F.                                                       [100%]
self = <test_a.TestA object at 0x{address}>
>       assert open('/tmp/tmp{drawn}/x').read() == 'b'
E       AssertionError: assert 'a' == 'b'
bash: line 1: {pid} Killed                  python x.py
server with pid {pid} ended
{seconds}s call     tests/test_a.py::test_x
FAILED tests/test_a.py::test_x - AssertionError: assert 'a' == 'b'
{rule} 1 failed, 1 passed in {seconds}s {rule}
sympy/core/tests/test_x.py::test_long - Took {seconds} seconds
Ran 16 tests in {seconds}s
=========== tests finished: 6 passed, 24 exceptions, in {seconds} seconds ===========
"""
FIRST = RUN.format(
    run=0, address="7f3c5a1d2e80", drawn="ab12cd_4", pid=812, seconds="9.99", seed=40449524, rule="=" * 24
)
SECOND = RUN.format(
    run=17, address="7fdbd53e3820", drawn="zz98yy77", pid=40112, seconds="110.02", seed=7, rule="=" * 22
)


def digest_of(text: str, names: tuple[str, ...] = ALL) -> str | None:
    data = {"observation": {"stdout": text, "exit_code": 1}, "reward": 0.0, "done": False}
    return semantic_digest(json.dumps(data).encode(), names)


def test_two_equal_runs_have_one_digest() -> None:
    assert digest_of(FIRST) == digest_of(SECOND)
    for name in ALL:  # each of them is needed
        assert digest_of(FIRST, tuple(set(ALL) - {name})) != digest_of(SECOND, tuple(set(ALL) - {name})), name


def test_the_order_of_the_slowest_is_no_outcome() -> None:
    lines = ("0.02s call     a.py::test_x\n", "0.01s setup    a.py::test_x\n", "0.01s call     a.py::test_y\n")
    usual = digest_of("".join(lines) + "end")
    assert digest_of("".join(reversed(lines)) + "end") == usual
    assert digest_of("".join((*lines[:2], lines[0])) + "end") != usual
    assert digest_of("".join(lines[:2]) + "end") != usual


def test_one_character_of_the_outcome_changes_the_digest() -> None:
    free = re.compile(
        r"(?<=seed: {8})\d+|(?<=SEED=)\d+|(?<=seed=)\d+|"
        r"0x[0-9a-f]+|/tmp/tmp\w{8}|agent/pytest-\d+|(?<=line 1: )\d+|(?<=pid )\d+|\d+\.\d+(?=s| seconds)|=+"
    )
    drawn = {at for found in free.finditer(FIRST) for at in range(*found.span())}
    usual = digest_of(FIRST)
    for at, char in enumerate(FIRST):
        if at not in drawn and char.isalnum():
            other = FIRST[:at] + ("7" if char.isdigit() else "q" if char != "q" else "z") + FIRST[at + 1 :]
            if other != FIRST:
                assert digest_of(other) != usual, (at, FIRST[max(0, at - 20) : at + 20])
    for was, now in (
        ("1 failed, 1 passed", "2 failed, 1 passed"),
        ("[100%]", "[ 99%]"),
        ("F.", ".F"),
        ("'a' ==", "'b' =="),
    ):
        assert digest_of(FIRST.replace(was, now)) != usual, was


def test_the_same_object_twice_and_two_objects_stay_different() -> None:
    one, two = "<A object at 0x7f3c5a1d2e80>", "<A object at 0x7f3c5a1d2e99>"
    assert digest_of(one + one) == digest_of(two + two) != digest_of(one + two)
    assert digest_of("/tmp/tmpab12cd34 /tmp/tmpab12cd34") != digest_of("/tmp/tmpab12cd34 /tmp/tmpab12cd35")
    assert digest_of("pid 1 pid 1") == digest_of("pid 3 pid 3") != digest_of("pid 1 pid 2")


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("the value is 0x7f3c5a1d2e80", "the value is 0x7f3c5a1d2e81"),
        ("/tmp/settings", "/tmp/template"),
        ("took 3.20 s", "took 3.30 s"),
        ("the random seed: 3", "the random seed: 4"),
        ("  test_x - Took 3.2 seconds to win", "  test_x - Took 3.3 seconds to win"),
        ("rapid 3", "rapid 4"),
        ("1 passed in 1 room", "1 passed in 2 room"),
    ],
)
def test_what_only_looks_so_counts(was: str, now: str) -> None:
    assert digest_of(was) != digest_of(now)


def test_names_are_checked_and_fields_stay() -> None:
    assert field_names("took_s,~pids") == ("took_s", "~pids")
    assert resolved(("~pids",), (SweObservation,), mcp=False) == (("~pids",), ())
    assert set(ALL) <= set(written_by_class(SweObservation.VOLATILE_FIELDS))
    with pytest.raises(InvalidRequest, match="~no is no normaliser: there are ~test_durations"):
        field_names("~no")
    assert digest_of("a") != digest_of("b") and digest_of("a") != digest_of("")


def test_long_texts_take_linear_time() -> None:
    for piece in ("=", "1 failed, ", "Ran 1", "/tmp/", " at 0x7f", "pid ", "line 1: ", "9.9s call "):
        assert digest_of(piece * (300_000 // len(piece)))


def test_the_observation_of_swe_bench_lite_keeps_its_output() -> None:
    digests = {
        semantic_digest(
            encode_payload({"observation": {"stdout": text, "duration_s": took}}), SweObservation.VOLATILE_FIELDS
        )
        for text, took in ((FIRST, 1.0), (SECOND, 2.0))
    }
    assert len(digests) == 1
