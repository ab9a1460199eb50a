"""The blocking client's fork, attach and replay on an Errata server."""

from __future__ import annotations

import pytest
from fake_errata import FakeErrata

from errata_client import ErrataClient, SyncErrataClient
from errata_protocol.errors import InvalidRequest


def test_a_blocking_fork_is_a_connected_blocking_client(errata: FakeErrata, errata_url: str) -> None:
    with ErrataClient(errata_url).sync() as client:
        client.reset()
        client.step({"text": "a"})
        client.step({"text": "b"})
        with client.fork(1) as child:
            assert isinstance(child, SyncErrataClient)
            assert child.step({"text": "c"}).observation["count"] == 2
            assert child.state_at(0).payload == client.state_at(1).payload
            assert len(child.history()) == 3
        assert errata.sessions == {}
        assert client.step({"text": "d"}).observation["count"] == 3
        assert len(client.history()) == 4
        kept_open = client.fork(2)
        assert kept_open.session_id in errata.sessions
    assert errata.sessions == {}, "children are closed with their parent"


def test_a_blocking_durable_client_attaches_again(errata: FakeErrata, errata_url: str) -> None:
    errata.faults["step"] = ["cut"]
    client = ErrataClient(errata_url, durable=True).sync()
    client.reset()
    with pytest.raises(Exception, match="1012"):
        client.step({"text": "a"})
    with pytest.raises(InvalidRequest):
        client.step({"text": "a"})
    assert client.reattach().t == 1
    client.end_session()
    assert errata.sessions == {}


def test_a_blocking_client_calls_tools(errata_url: str) -> None:
    with ErrataClient(errata_url).sync() as client:
        assert client.call_tool("look") == {"text": "look"}
