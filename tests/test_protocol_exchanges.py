"""The example exchanges of rfcs/PROTOCOL.md are what a server says, byte for byte, and what both codecs read."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from pydantic import BaseModel, ValidationError

from errata_protocol.errors import Unparsable
from errata_protocol.mux import CLIENT_MESSAGES, SERVER_MESSAGES
from errata_protocol.mux.envelope import Malformed, read_frame, read_server_frame
from errata_protocol.payload import digest

from .protocol_exchanges import TEXT, Exchange, exchanges, played, read_line

EXCHANGES = exchanges(TEXT.read_text())
each = pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.name)
WRONG_FRAMES = "mux-errors"
"""The exchange in which a client sends what cannot be read."""


@each
async def test_a_server_says_what_the_text_says(exchange: Exchange) -> None:
    assert await played(exchange) == list(exchange.lines), (
        "python scripts/protocol_examples.py writes the server's lines"
    )


def test_each_block_of_the_text_is_played() -> None:
    assert len(EXCHANGES) == TEXT.read_text().count("```text") == len({exchange.name for exchange in EXCHANGES})


@each
def test_the_codec_reads_each_frame(exchange: Exchange) -> None:
    for way, text in exchange.frames():
        if way == "<--":
            ((envelope, data),) = read_server_frame(text)
            if envelope.digest is not None:
                assert envelope.digest == digest(data)
            continue
        try:
            wrong = [element for element in read_frame(text) if isinstance(element, Malformed)]
        except Unparsable:
            wrong = [None]
        assert not wrong or exchange.name == WRONG_FRAMES


def models(way: str, said: dict[str, object]) -> Iterator[type[BaseModel]]:
    """Yield the messages that an envelope can be."""
    for model in CLIENT_MESSAGES if way == "-->" else SERVER_MESSAGES:
        try:
            model.model_validate_json(json.dumps(said))
        except ValidationError:
            continue
        yield model


def test_the_exchanges_have_a_message_of_each_kind() -> None:
    found = set()
    for exchange in EXCHANGES:
        for way, text in exchange.frames():
            if exchange.name == WRONG_FRAMES and way == "-->":
                continue
            said = json.loads(text)
            for envelope in said if isinstance(said, list) else [said]:
                kinds = {(way, model) for model in models(way, envelope)}
                assert kinds, envelope
                found |= kinds
    wanted = {("-->", model) for model in CLIENT_MESSAGES} | {("<--", model) for model in SERVER_MESSAGES}
    missing = {(way, model.__name__) for way, model in wanted - found}
    assert missing == {("<--", "Part")}  # a server's have 128 KiB each; a client's stand for them


def test_a_line_that_is_none_is_an_error() -> None:
    with pytest.raises(ValueError, match="no line of an exchange"):
        read_line("[1] ->> {}")
