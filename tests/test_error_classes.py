"""Every error of ours crosses a process's border: it is pickled in a worker process, and raised by the server."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from errata_protocol.errors import ErrataError, StateOutOfRange, UnknownEpisode
from errata_server.workers import DEFAULT, BudgetExceeded
from swe_bench_lite_env.server.texts import ToolRefused

from .test_internals import OURS, modules


def subclasses(cls: type[ErrataError] = ErrataError) -> Iterator[type[ErrataError]]:
    yield cls
    for sub in cls.__subclasses__():
        yield from subclasses(sub)


def assert_same(error: ErrataError) -> None:
    for same in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(same) is type(error) and str(same) == str(error) and same.args == error.args
        assert same.__dict__ == error.__dict__


@pytest.mark.parametrize(
    "error",
    [
        UnknownEpisode("e"),
        StateOutOfRange("e", 9, 5),
        ToolRefused("why", "old_text", 3),
        BudgetExceeded("the log", "time", DEFAULT),
        ErrataError("why", field="old_text"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_what_it_was_after_pickling_and_copying(error: ErrataError) -> None:
    error.add_note("in a worker process")
    assert_same(error)


def test_so_is_one_of_every_class_whatever_its_constructor_takes() -> None:
    for _ in modules():
        pass
    found = [cls for cls in subclasses() if cls.__module__.split(".")[0] in OURS]
    assert len(found) > 60
    for cls in found:
        error = cls.__new__(cls, "why")
        ErrataError.__init__(error, "why", eid="e")
        error.__dict__.update(field="f", line=3)
        assert_same(error)
