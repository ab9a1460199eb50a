"""No name of any kind is a path, whatever somebody sends."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import PurePosixPath

import pytest

from errata_protocol import names
from errata_protocol.names import InvalidName, Kind, member_path, shown
from tests.hostile_names import WHOLE, hostile_values

KINDS = {name: value for name, value in vars(names).items() if isinstance(value, Kind)}
VALID = {
    "BASE": ("default", "swe-flask_1.0"),
    "BASE_ID": ("default-0123456789abcdef",),
    "LAYER": ("a1B2", "f" * 64),
    "DIGEST_ID": ("0" * 64,),
    "EPISODE": ("e_-1", "x" * 200),
    "SESSION": ("s" * 21,),
    "SHARD": ("k3v9x0q7m2ab",),
    "ENVIRONMENT": ("swe_bench.lite-2",),
    "INSTANCE": ("psf__requests-1.2+x",),
    "PACKAGE_FILE": ("requests-2.0+x!1-py3.none-any.whl", "a" * 255),
    "PROJECT": ("zope.interface", "a", "x" * 200),
    "REPOSITORY": ("django/django", "..a/.b."),
}
CASES = 4000


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_right_passes(kind: str) -> None:
    assert kind in names.__all__
    for name in VALID[kind]:
        assert KINDS[kind].check(name) == name and KINDS[kind].matches(name)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_passes_is_a_path(kind: str) -> None:
    checked = KINDS[kind]
    refused = 0
    for value in islice(hostile_values(random.Random(5), VALID[kind][0]), CASES):
        if not checked.matches(value):
            with pytest.raises(InvalidName) as caught:
                checked.check(value)
            assert len(str(caught.value)) < 400 and str(caught.value).isascii() and str(caught.value).isprintable()
            refused += 1
            continue
        assert isinstance(value, str) and value.isascii() and value.isprintable() and len(value) <= 255
        parts = PurePosixPath("/root", value).parts
        assert parts == ("/", "root", *value.split("/")) and not {"", ".", "..", "~"} & set(value.split("/"))
        assert len(value.split("/")) == (2 if kind == "REPOSITORY" else 1)
    assert refused > CASES // 2


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("a/b", "a/b"),
        ("./a//b/", "a/b"),
        ("/a", "a"),
        ("//a", "a"),
        (".", ""),
        ("", ""),
        ("...", "..."),
        ("\udc80", "\udc80"),
    ],
)
def test_a_member_is_below_the_root(name: str, path: str) -> None:
    assert member_path(name) == PurePosixPath(path)


def test_no_member_is_above_the_root() -> None:
    draw, kept = random.Random(6), 0
    for value in islice(hostile_values(draw, "usr/lib/x"), CASES):
        if not isinstance(value, str):
            continue
        try:
            path = member_path(value)
        except InvalidName as error:
            assert len(str(error)) < 400 and str(error).isprintable()
            continue
        kept += 1
        assert not path.is_absolute() and ".." not in path.parts and "\0" not in str(path)
        assert all(len(part.encode("utf-8", "surrogateescape")) <= 255 for part in path.parts)
    assert kept > 100


@pytest.mark.parametrize("value", [*WHOLE, 5, None, "x" * 10**6], ids=lambda value: ascii(value)[:20])
def test_what_a_message_shows_is_short_and_plain(value: object) -> None:
    assert shown(value).isascii() and shown(value).isprintable() and len(shown(value)) < 500
