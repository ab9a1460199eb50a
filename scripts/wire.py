"""Write rfcs/schemas/ (JSON Schema of each mux message and of what other doors say) and tests/golden/mux/ (the bytes of
each mux message, as the machines send them).

python scripts/wire.py                # write
python scripts/wire.py --check        # exit 1 where a file is not what would be written
python scripts/wire.py --release 0.1  # keep today's conversation for good: later versions have to understand it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from errata_protocol import Capabilities
from errata_protocol.capabilities import ServerLimits
from errata_protocol.error_info import ErrorInfo
from errata_protocol.markers import ErrorMarkers
from errata_protocol.mux import (
    CLIENT_MESSAGES,
    SERVER_MESSAGES,
    AnswerRead,
    ClientProtocol,
    ClientRequest,
    Effect,
    EncodedReply,
    FindSession,
    RecordError,
    RunRequest,
    ServerConfig,
    ServerProtocol,
    Stored,
    schemas,
)
from errata_protocol.mux.messages import StateAtReply
from errata_protocol.payload import digest
from errata_protocol.replay import ForkReply, ForkRequest, RewardPost, RewardRecord, StateAtRequest

ROOT = Path(__file__).parents[1]
SID, KEY = "Zq3vK8s0T1u5Wb7Yc9Xd2A", "n4Jr6Lm8Po0Qs2Tu4Vw6Xy"
CHILD, CHILD_KEY = "child0Zq3vK8s0T1u5Wb7Y", "childkey0n4Jr6Lm8Po0Qs"
GROUP, EID = "group0Zq3vK8s0T1u5Wb7Y", "e-5f0c"
STEP = b'{"tool":"run","command":"caf\xc3\xa9 \\u00e9",  "n": 1.0}'
PAYLOAD = b'{"observation":{"stdout":"caf\xc3\xa9"},"reward":0.5,"done":false}'
REWARD = b'{"eid":"e-5f0c","t":1,"value":1.0,"source":"judge","reward_id":"r-1"}'


class Shell:
    """What answers a server's machine, always in the same way."""

    def __init__(self) -> None:
        self.protocol = ServerProtocol(ServerConfig(limits=ServerLimits(max_frame=1 << 20)))
        self._deliveries = {"reset": 0, "step": 1, "mcp": 2}

    def perform(self, effects: list[Effect]) -> None:
        """Do what the machine asks for."""
        server = self.protocol
        for effect in effects:
            if isinstance(effect, FindSession):
                stored = Stored(eid="e-77", t=0) if effect.session.sid == CHILD else Stored(recovery="snapshot")
                self.perform(server.found(effect, stored, 0.0))
            elif isinstance(effect, RecordError):
                self.perform(server.completed(effect, effect.reply, 0.0))
            elif isinstance(effect, RunRequest):
                reply = {
                    "fork": EncodedReply(
                        "forked", b'{"sid":"%s","eid":"e-77","t":0,"origin":{"eid":"e-5f0c","t":1}}' % CHILD.encode()
                    ),
                    "close": EncodedReply("closed", b"{}"),
                }.get(effect.kind)
                if reply is None:
                    payload = PAYLOAD if effect.kind != "mcp" else b'{"jsonrpc":"2.0","id":1,"result":{"content":[]}}'
                    kind = "mcp" if effect.kind == "mcp" else "observation"
                    reply = EncodedReply(kind, payload, EID, self._deliveries[effect.kind], digest(payload))
                self.perform(server.completed(effect, reply, 0.0))
            elif isinstance(effect, AnswerRead):
                self.perform(server.read_answered(effect, _answer(effect)))

    def push(self) -> None:
        """Let a late reward come."""
        self.perform(self.protocol.pushed(SID, 1, REWARD))


def drive(client: ClientProtocol, exchange: Callable[[], None], push: Callable[[], None]) -> ClientRequest:
    """Have a client ask for everything once; return its last request.

    Args:
        client: Not yet connected.
        exchange: Carries what both sides have to say, until neither has more.
        push: Lets a late reward come.
    """
    client.connected(0.0)
    session = client.open(SID, KEY, GROUP)
    client.request(session, "reset", b'{"seed":7}')
    exchange()
    client.request(session, "step", STEP, condition=(0, EID), deadline_ms=60000)
    client.request(
        session, "mcp", b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"f","arguments":{}}}'
    )
    client.fork(session, 1, CHILD, CHILD_KEY)
    client.read("mcp", session, b'{"jsonrpc":"2.0","id":2,"method":"tools/list"}')
    client.read("state", session)
    client.read("rewards", session, b'{"eid":"%s"}' % EID.encode())
    client.read("capabilities")
    client.read("close_group", None, b'{"group":"%s"}' % GROUP.encode())
    exchange()
    client.read("state", session, b'{"t":1,"eid":"%s"}' % EID.encode())
    push()
    exchange()
    client.acknowledge(session)
    late = client.request(session, "step", b'{"wait":1}', condition=(9, None))
    exchange()
    return late


def conversation() -> list[list[dict[str, list[str]]]]:
    """Return what is said: exchanges, in each the turns, in each what the client and then the server says."""
    client, shell = ClientProtocol(), Shell()
    connection = shell.protocol.connect()
    said: list[list[dict[str, list[str]]]] = []

    def exchange() -> None:
        said.append([])
        while client.has_data or connection.has_data:
            asked, told = client.data_to_send(), []
            for frame in asked:
                shell.perform(shell.protocol.receive(connection, frame, 0.0))
            for frame in connection.data_to_send():
                told.append(frame.decode())
                client.receive(frame, 0.0)
            said[-1].append({"client": [frame.decode() for frame in asked], "server": told})

    drive(client, exchange, shell.push)
    return said


def messages() -> dict[str, bytes]:
    """Return the bytes of every message, by the name of its schema: both machines speak with each other once."""
    client, shell = ClientProtocol(), Shell()
    server, perform = shell.protocol, shell.perform
    connection = server.connect()
    found: dict[str, bytes] = {}

    def keep(side: str, frame: bytes) -> None:
        text = json.loads(frame)
        for envelope in text if isinstance(text, list) else [text]:
            name = f"{side}.{_model(side, envelope)}"
            found.setdefault(name, frame if not isinstance(text, list) else _element(frame, envelope))

    def exchange() -> None:
        while client.has_data or connection.has_data:
            for frame in client.data_to_send():
                keep("client", frame)
                perform(server.receive(connection, frame, 0.0))
            for frame in connection.data_to_send():
                keep("server", frame)
                client.receive(frame, 0.0)

    late = drive(client, exchange, shell.push)
    # Messages that a well-behaved pair does not send within one breath.
    found["client.Cancel"] = b'{"sid":"%s","id":%d,"type":"cancel"}' % (SID.encode(), (late.id or 0) + 1)
    perform(server.receive(connection, b'{"sid":"%s","id":99,"type":"step","data":{}}' % SID.encode(), 0.0))
    found["server.Error"] = connection.data_to_send()[0]
    other = server.connect()
    again = b'{"type":"resume","data":[{"sid":"%s","key":"%s","last":5,"last_seq":1,"fence":9}]}' % (
        SID.encode(),
        KEY.encode(),
    )
    perform(server.receive(other, again, 0.0))
    for frame in connection.data_to_send():
        keep("server", frame)
    for frame in other.data_to_send():
        keep("server", frame)
    closing = b'{"sid":"%s","id":6,"type":"close"}' % SID.encode()
    perform(server.receive(other, closing, 0.0))
    keep("client", closing)
    server.go_away(2.5)
    for frame in other.data_to_send():
        keep("server", frame)
    found["client.Part"] = _part(b'{"n":2,"of":2,"text":"\\"}}"}', b'"id":7')
    found["server.Part"] = _part(b'{"n":1,"of":2,"text":"{\\"sid\\":"}', b'"id":7')
    return dict(sorted(found.items()))


def _part(data: bytes, address: bytes) -> bytes:
    return b'{"sid":"%s",%s,"type":"part","data":%s}' % (SID.encode(), address, data)


def _answer(effect: AnswerRead) -> EncodedReply:
    match effect.kind:
        case "state" if "t" in effect.fields:
            return EncodedReply("state_at", PAYLOAD, EID, 1, digest(PAYLOAD), "step")
        case "state":
            return EncodedReply("state", b'{"episode_id":"alias","step_count":1}')
        case "capabilities":
            told = Capabilities(environment="terminal", extensions={"mux": 1}).model_dump(
                mode="json", exclude_none=True
            )
            return EncodedReply("capabilities", json.dumps(told, separators=(",", ":")).encode())
        case "rewards":
            return EncodedReply("rewards", b"[" + REWARD + b"]")
        case "close_group":
            return EncodedReply("group_closed", b'{"closed":0}')
    return EncodedReply("mcp", b'{"jsonrpc":"2.0","id":2,"result":{"tools":[]}}')


def _model(side: str, envelope: dict[str, Any]) -> str:
    """Return the name of the model that describes an envelope."""
    for model in CLIENT_MESSAGES if side == "client" else SERVER_MESSAGES:
        fields = model.model_fields
        named = fields["type"].annotation.__args__[0] == envelope["type"]  # type: ignore[union-attr]
        if named and all(name in envelope for name in ("id", "q") if name in fields and fields[name].is_required()):
            return model.__name__
    raise ValueError(f"no model for {envelope}")


def _element(frame: bytes, envelope: dict[str, Any]) -> bytes:
    """Return the exact bytes of one envelope of an array."""
    for raw in msgspec.json.decode(frame, type=list[msgspec.Raw]):
        if json.loads(bytes(raw)) == envelope:
            return bytes(raw)
    raise ValueError("not in the frame")


def other_schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (file name without suffix, JSON Schema) of what observations, plain sockets and HTTP hold."""
    for name, model in (
        ("observation.ErrorMarkers", ErrorMarkers),
        ("metadata.ErrorInfo", ErrorInfo),
        ("plain.Capabilities", Capabilities),
        ("plain.StateAtRequest", StateAtRequest),
        ("http.ForkRequest", ForkRequest),
        ("http.ForkReply", ForkReply),
        ("http.RewardPost", RewardPost),
        ("http.RewardRecord", RewardRecord),
    ):
        yield name, {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    frame = StateAtReply.model_json_schema()
    for name in ("sid", "q"):  # of multiplexed sockets only
        del frame["properties"][name]
        frame["required"].remove(name)
    yield "plain.StateAtFrame", {"$schema": "https://json-schema.org/draft/2020-12/schema", **frame}


def files() -> dict[Path, bytes]:
    """Return what each file shall hold."""
    made = {
        ROOT / "rfcs" / "schemas" / f"{name}.json": (json.dumps(schema, indent=1, sort_keys=True) + "\n").encode()
        for name, schema in (*schemas(), *other_schemas())
    }
    return made | {ROOT / "tests" / "golden" / "mux" / f"{name}.json": text for name, text in messages().items()}


def main() -> int:
    """Write or check all files."""
    if "--release" in sys.argv[1:]:
        path = ROOT / "tests" / "golden" / "released" / f"mux-{sys.argv[-1]}.json"
        path.parent.mkdir(exist_ok=True)
        with path.open("x") as file:  # what was released does not change
            json.dump(conversation(), file, indent=1)
            file.write("\n")
        return 0
    made = files()
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text)
        return 0
    wrong = [path for path, text in made.items() if not path.exists() or path.read_bytes() != text]
    for path in wrong:
        print(f"{path} is out of date: run python scripts/wire.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
