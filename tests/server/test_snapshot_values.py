"""``snapshot()`` may return bytes, text or a JSON value: ``restore`` gets it back, after a restart and in forks."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import State

from errata_protocol.environment import MAX_STATE_BYTES, Snapshot, SnapshotRef
from errata_server.environments.recovery_class import recovery_of
from errata_server.environments.snapshot_values import MAX_VALUE_BYTES, NotASnapshot, packed, unpacked
from errata_server.recovery import NONE, SNAPSHOT
from errata_server.settings import Settings

from .conftest import connect
from .environments import CountAction, CountObservation
from .test_reexecute import asleep, fork, served

JSON = st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner | st.none()) | st.dictionaries(st.text(), inner | st.none()),
    max_leaves=8,
)


@given(JSON | st.binary())
def test_restore_gets_what_snapshot_returned(value: Any) -> None:
    again = unpacked(packed(value))
    assert again == value and type(again) is type(value)


@given(st.binary(), st.sampled_from([b"", b"\0errata-", b"\0errata-json\0", b"\0errata-state\0"]))
def test_a_snapshot_of_any_bytes_is_kept(state: bytes, head: bytes) -> None:
    snapshot = Snapshot(head + state, (SnapshotRef("layer", "a"),))
    assert unpacked(packed(snapshot)) == snapshot


@pytest.mark.parametrize("value", [None, (1, 2), {1: 2}, {"a": {1}}, float("nan"), object(), [b"x"], {"a": (1,)}])
def test_what_json_would_change_is_refused(value: Any) -> None:
    with pytest.raises(NotASnapshot, match="not a Snapshot, bytes, text or a JSON value"):
        packed(value)


@pytest.mark.parametrize("of", [bytes, str])
def test_a_value_has_a_bound_and_the_message_says_it(of: Any) -> None:
    most = MAX_VALUE_BYTES if of is bytes else MAX_VALUE_BYTES - 2
    largest = b"x" * most if of is bytes else "x" * most
    assert unpacked(packed(largest)) == largest and len(packed(largest).state) <= MAX_STATE_BYTES
    with pytest.raises(NotASnapshot, match=f"{MAX_VALUE_BYTES + 1} bytes, at most {MAX_VALUE_BYTES}"):
        packed(largest + largest[:1])


class Counting(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.n, self._state = 0, State(step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> CountObservation:
        self.n, self._state = 0, State(episode_id=episode_id, step_count=0)
        return CountObservation(n=0)

    def step(self, action: CountAction, timeout_s: float | None = None, **_: Any) -> CountObservation:
        self.n += action.n
        self._state.step_count += 1
        return CountObservation(n=self.n, reward=float(action.n))

    @property
    def state(self) -> State:
        return self._state


class Text(Counting):
    def snapshot(self) -> str:
        return f"{self.n} {self._state.step_count} é"

    def restore(self, snapshot: str) -> None:
        n, steps, _ = snapshot.split()
        self.n, self._state = int(n), State(step_count=int(steps))


class Object(Counting):
    def snapshot(self) -> dict[str, int]:
        return {"n": self.n, "steps": self._state.step_count}

    def restore(self, snapshot: dict[str, int]) -> None:
        self.n, self._state = snapshot["n"], State(step_count=snapshot["steps"])


class Unannotated(Counting):
    def snapshot(self):  # type: ignore[no-untyped-def]
        return pickle.dumps((self.n, self._state))

    def restore(self, snapshot):  # type: ignore[no-untyped-def]
        self.n, self._state = pickle.loads(snapshot)


class Growing(Object):
    def snapshot(self) -> dict[str, int]:
        return {"n": self.n, "much": "x" * MAX_STATE_BYTES} if self.n > 1 else super().snapshot()  # type: ignore[dict-item]


class OwnNothing(Counting):
    """Methods of its own, which happen to have these names."""

    def snapshot(self):  # type: ignore[no-untyped-def]
        return None

    def restore(self, name):  # type: ignore[no-untyped-def]
        raise AssertionError


@pytest.mark.parametrize("env", [Text, Object, Unannotated])
def test_a_session_and_its_fork_go_on_from_the_value(env: Any, tmp_path: Path) -> None:
    assert recovery_of(env) is SNAPSHOT
    app = served(env, settings=Settings(detach_ttl_s=0.0, data_dir=tmp_path))
    with TestClient(app) as client:
        with connect(client) as parent:
            eid = parent.ask("reset", {})["eid"]
            for _ in range(3):
                parent.ask("step", {"n": 2})
            child = fork(client, eid, 2)
        for n in (5, 6):  # the second time from its own last delivery
            with connect(client, f"/ws?session_id={child['session_id']}") as socket:
                assert socket.ask("step", {"n": 1})["data"]["observation"]["n"] == n
            asleep(app)


def test_a_value_that_is_too_large_fails_the_step_and_says_the_bound() -> None:
    with TestClient(served(Growing)) as client, connect(client) as socket:
        socket.ask("reset", {})
        refused = socket.ask("step", {"n": 2})["data"]
        assert refused["code"] == "ENV_OUTPUT_INVALID" and f"at most {MAX_VALUE_BYTES}" in refused["message"]


class OwnTuple(OwnNothing):
    def snapshot(self) -> tuple[str, int]:  # type: ignore[override]
        return ("a", 1)


def test_methods_of_the_environments_own_are_left_alone() -> None:
    assert recovery_of(OwnTuple) is NONE
    with TestClient(served(OwnNothing)) as client, connect(client) as socket:
        assert socket.ask("reset", {})["t"] == 0 and socket.ask("step", {"n": 1})["t"] == 1
        assert socket.ask("capabilities")["data"]["recovery"] == NONE.name
