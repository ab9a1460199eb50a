import pytest

from spantext import parse, show


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5400, "1h 30m"), (0, "0s"), (59, "59s"), (694861, "1w 1d 1h 1m 1s"), (60.9, "1m")],
    ids=["hours", "none", "seconds", "all", "rest"]
)
def test_spans_are_written_from_the_largest_unit(seconds, text):
    assert show(seconds) == text


def test_what_is_written_is_read():
    for seconds in (0, 1, 61, 3600, 86399, 1000000):
        assert parse(show(seconds)) == seconds
