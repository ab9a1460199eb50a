"""Messages cut out of a client's bytes are those that the WebSocket library finds in them, however they came."""

from __future__ import annotations

import re
import struct

from hypothesis import example, given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode
from websockets.protocol import OPEN, SERVER, Protocol

from errata_server.serve.ws_frames import ClientFrames, Other

MAX_BYTES = 70_000
MASK = b"\x01\x80\xffa"


def frame(opcode: int, data: bytes, *, fin: bool = True, rsv: int = 0, masked: bool = True) -> bytes:
    size = len(data)
    mask_bit = 0x80 if masked else 0
    if size < 126:
        head = bytes((opcode | (0x80 if fin else 0) | rsv, size | mask_bit))
    elif size < 65536:
        head = struct.pack("!BBH", opcode | (0x80 if fin else 0) | rsv, 126 | mask_bit, size)
    else:
        head = struct.pack("!BBQ", opcode | (0x80 if fin else 0) | rsv, 127 | mask_bit, size)
    body = bytes(byte ^ MASK[at % 4] for at, byte in enumerate(data)) if masked else data
    return head + (MASK if masked else b"") + body


class Reader:
    """The library's reader behind the handshake."""

    def __init__(self) -> None:
        self._protocol = Protocol(SERVER, state=OPEN, max_size=MAX_BYTES)
        self.error: str | None = None
        self.pongs = b""

    def take(self, data: bytes) -> list[tuple[int, bool, bytes]]:
        if self.error is None:
            self._protocol.receive_data(data)
            if self._protocol.parser_exc is not None:
                self.error = re.sub(r"\d\d+", "N", repr(self._protocol.parser_exc))  # sizes are not compared
        for sent in self._protocol.data_to_send():
            self.pongs += sent if sent[:1] != b"\x88" else sent[:1] + sent[2:4]  # of a close its code, not its words
        events = self._protocol.events_received()
        return [(e.opcode, e.fin, bytes(e.data)) for e in events if isinstance(e, Frame)]


def cut_and_read(chunks: list[bytes]) -> tuple[list[tuple[int, bool, bytes]], str | None, bytes, int]:
    frames, reader = ClientFrames(MAX_BYTES), Reader()
    found: list[tuple[int, bool, bytes]] = []
    cut = 0
    for chunk in chunks:
        for piece in frames.cut(chunk):
            if isinstance(piece, Other):
                found += reader.take(piece.data)
            else:
                assert isinstance(piece, bytes)
                found.append((Opcode.BINARY, True, piece))
                cut += 1
    return found, reader.error, reader.pongs, cut


def messages(frames: list[tuple[int, bool, bytes]]) -> list[tuple[str, bytes]]:
    """Join fragments; what is unfinished in the end, or no text, is not compared."""
    found: list[tuple[str, bytes]] = []
    kind, parts = 0, [b""]
    for opcode, fin, data in frames:
        if opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            found.append((str(opcode), data))
            continue
        kind, parts = (kind, [*parts, data]) if opcode == Opcode.CONT else (opcode, [data])
        if fin:
            whole = b"".join(parts)
            text_or_not = whole if kind == Opcode.BINARY else whole.decode(errors="replace").encode()
            found.append(("message", b"no text" if text_or_not != whole else whole))
    return found


payloads = st.binary(max_size=200) | st.sampled_from(["ä".encode() * 70, b"a" * 126, b"b" * 65_536, b"c" * 70_001])
usual = st.builds(frame, st.sampled_from([1, 2]), payloads)
rare = st.builds(
    frame,
    st.sampled_from([0, 1, 2, 8, 9, 10, 3]),
    payloads,
    fin=st.booleans(),
    rsv=st.sampled_from([0, 0, 0x40]),
    masked=st.sampled_from([True, True, False]),
)
control = st.builds(frame, st.sampled_from([9, 10]), st.binary(max_size=125))


@given(st.lists(usual | usual | control | rare, max_size=8), st.lists(st.integers(0, 2_000), max_size=6))
@example([frame(1, b"whole"), frame(1, b"half", fin=False), frame(0, b"rest"), frame(1, b"next")], [])
@example([frame(1, b"a" * 300), frame(9, b"ping"), frame(1, b"b")], [100, 1, 1, 1, 200])
def test_whatever_comes_is_read_as_the_library_reads_it(sent: list[bytes], cuts: list[int]) -> None:
    data = b"".join(sent)
    chunks, at = [], 0
    for size in cuts:
        chunks.append(data[at : at + size])
        at += size
    chunks.append(data[at:])
    reader = Reader()
    found, error, pongs, _ = cut_and_read([chunk for chunk in chunks if chunk])
    read = reader.take(data) if data else []
    assert messages(found) == messages(read) and (error, pongs) == (reader.error, reader.pongs)


def test_data_frames_pass_no_other_reader() -> None:
    sent = [frame(1, b'{"a":%d}' % n) for n in range(100)]
    found, error, _, cut = cut_and_read([b"".join(sent[:50]) + sent[50][:7], sent[50][7:] + b"".join(sent[51:])])
    assert [data for _, _, data in found] == [b'{"a":%d}' % n for n in range(100)]
    assert error is None and cut == 100


def test_text_that_is_no_text_is_left_to_the_socket_to_refuse() -> None:
    (piece,) = ClientFrames(MAX_BYTES).cut(frame(1, b"\xff"))
    assert isinstance(piece, Other)
    assert ClientFrames(MAX_BYTES).cut(frame(2, b"\xff")) == [b"\xff"]
