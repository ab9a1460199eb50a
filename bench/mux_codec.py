"""What the pure half of a mux step costs the server: read a frame, admit its requests, write their replies.

    python bench/mux_codec.py           # prints JSON; medians of 7 rounds in microseconds of CPU per envelope
    python bench/mux_codec.py --smoke   # once, small

Sessions are attached before; the shell is a loop that completes every request at once. Frames of 1 and of 64 envelopes
alternate within a round. `parse` is the strict scan alone; `json` is ``json.loads`` of the same frames, for a baseline.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable

from errata_protocol.mux import EncodedReply, FindSession, RunRequest, ServerConfig, ServerProtocol, Stored
from errata_protocol.mux.envelope import read_frame
from errata_protocol.payload import digest

SMOKE = "--smoke" in sys.argv[1:]
SESSIONS = 100 if SMOKE else 10_000
ROUNDS = 1 if SMOKE else 7
ACTION = b'{"message":"%s"}' % (b"x" * 64)
PAYLOAD = b'{"observation":{"echo":"%s"},"reward":0.0,"done":false}' % (b"x" * 64)
REPLY = EncodedReply("observation", PAYLOAD, "0123456789abcdef0123", 3, digest(PAYLOAD))


def sid(n: int) -> str:
    """Return a session id of usual length."""
    return f"{n:0>32x}"


class Server:
    """The machine with all sessions attached to one socket."""

    def __init__(self) -> None:
        self.protocol = ServerProtocol(ServerConfig())
        self.connection = self.protocol.connect()
        self.next_id = 1
        for n in range(SESSIONS):
            frame = b'{"sid":"%s","type":"open","data":{"key":"%s"}}' % (sid(n).encode(), sid(n).encode())
            for effect in self.protocol.receive(self.connection, frame, 0.0):
                if isinstance(effect, FindSession):
                    self.protocol.found(effect, Stored(), 0.0)
        self.connection.data_to_send()

    def frames(self, size: int) -> list[bytes]:
        """Return a step of every session, in frames of ``size``."""
        id, self.next_id = self.next_id, self.next_id + 1
        steps = [
            b'{"sid":"%s","id":%d,"type":"step","data":%s}' % (sid(n).encode(), id, ACTION) for n in range(SESSIONS)
        ]
        if size == 1:
            return steps
        return [b"[" + b",".join(steps[start : start + size]) + b"]" for start in range(0, SESSIONS, size)]

    def round(self, size: int) -> dict[str, float]:
        """Return microseconds of CPU per envelope of each stage."""
        frames = self.frames(size)
        costs = {
            "json": timed(lambda: [json.loads(frame) for frame in frames]),
            "parse": timed(lambda: [read_frame(frame) for frame in frames]),
        }
        runs: list[RunRequest] = []
        protocol, connection = self.protocol, self.connection

        def admit() -> None:
            for frame in frames:
                runs.extend(protocol.receive(connection, frame, 0.0))  # type: ignore[arg-type] # only runs come

        def reply() -> None:
            for start in range(0, len(runs), size):
                for run in runs[start : start + size]:
                    protocol.completed(run, REPLY, 0.0)
                connection.data_to_send()

        costs["parse + admit"] = timed(admit)
        assert len(runs) == SESSIONS
        costs["reply + frame"] = timed(reply)
        costs["all"] = costs["parse + admit"] + costs["reply + frame"]
        return costs


def timed(work: Callable[[], object]) -> float:
    """Return microseconds of CPU per session."""
    started = time.process_time()
    work()
    return (time.process_time() - started) / SESSIONS * 1e6


def main() -> None:
    """Measure and print."""
    server = Server()
    server.connection.config.limits.in_flight_socket = SESSIONS + 1
    rounds: dict[int, list[dict[str, float]]] = {1: [], 64: []}
    for _ in range(ROUNDS):
        for size in rounds:
            rounds[size].append(server.round(size))
    result: dict[str, object] = {
        "sessions": SESSIONS,
        "rounds": ROUNDS,
        "python": platform.python_version(),
        "action_bytes": len(ACTION),
        "payload_bytes": len(PAYLOAD),
    }
    for size, costs in rounds.items():
        result[f"frames of {size}"] = {
            stage: {
                "median_us": round(statistics.median(cost[stage] for cost in costs), 2),
                "spread_us": [round(f(cost[stage] for cost in costs), 2) for f in (min, max)],
            }
            for stage in costs[0]
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
