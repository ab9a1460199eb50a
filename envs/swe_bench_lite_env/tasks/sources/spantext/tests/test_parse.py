import pytest

from spantext import SpanInvalid, parse


def name(value):
    return str(value).replace(" ", "_")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("1h 30m", 5400), (" 2 d ", 172800), ("1W", 604800), ("-5m", -300), ("0s", 0)],
    ids=name,
)
def test_spans_of_units(text, seconds):
    assert parse(text) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("2:05", 125), ("1:00:00", 3600), ("0:00", 0)])
def test_spans_as_on_a_clock(text, seconds):
    assert parse(text) == seconds


@pytest.mark.parametrize(
    ("text", "at"),
    [("", 0), ("h", 0), ("5", 0), ("5 x", 2), ("1h 5", 3), ("5m !", 2), ("1:", 0), ("1:2:3:4", 0)],
    ids=name,
)
def test_what_is_no_span_is_refused_with_its_place(text, at):
    with pytest.raises(SpanInvalid) as caught:
        parse(text)
    assert caught.value.at == at
