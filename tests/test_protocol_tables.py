"""The tables of rfcs/PROTOCOL.md name what the code sends and reads: no message, field or code is missing there."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from errata_protocol.capabilities import Capabilities, ServerLimits, SessionPosition
from errata_protocol.environment import Recovery
from errata_protocol.error_info import ErrorInfo, InfoSite
from errata_protocol.errors import CODES
from errata_protocol.fleet import MAX_MEMBERS, MAX_WAIT_S, FleetMember, FleetMembers
from errata_protocol.markers import VERSION, ErrorKind, ErrorMarkers, ErrorSite
from errata_protocol.mux import CLIENT_MESSAGES, SERVER_MESSAGES
from errata_protocol.mux.envelope import MAX_DEPTH, Envelope, ServerEnvelope
from errata_protocol.mux.messages import ForkedData, PositionData, ResumeEntry, RewardData
from errata_protocol.mux.parts import MESSAGES_AT_ONCE, PART_BYTES
from errata_protocol.mux.server_session import ServerConfig
from errata_protocol.replay import (
    DeletedEpisodes,
    DeleteRequest,
    EpisodeDetail,
    ForkReply,
    ForkRequest,
    RewardRecord,
    TurnRecord,
)

TEXT = (Path(__file__).parents[1] / "rfcs" / "PROTOCOL.md").read_text()
CLAUSES = dict(re.findall(r"^##+ ([A-G]\d*|Terms)\b[^\n]*\n(.*?)(?=^##|\Z)", TEXT, re.M | re.S))


def named(*clauses: str) -> set[str]:
    """Return the words that clauses name in code, exchanges left out."""
    text = "".join(re.sub(r"```.*?```", "", CLAUSES[clause], flags=re.S) for clause in clauses)
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", text))))


@pytest.mark.parametrize(
    ("clause", "model"),
    [
        ("A1", Capabilities),
        ("A1", ServerLimits),
        ("A1", SessionPosition),
        ("A5", ForkRequest),
        ("A5", ForkReply),
        ("B1", ErrorMarkers),
        ("B3", ErrorSite),
        ("B5", ErrorInfo),
        ("B5", InfoSite),
        ("D2", PositionData),
        ("D2", ForkedData),
        ("D2", RewardData),
        ("D7", ResumeEntry),
        ("F4", RewardRecord),
        ("F6", FleetMember),
        ("F6", FleetMembers),
        ("G", EpisodeDetail),
        ("G", TurnRecord),
        ("G", DeleteRequest),
        ("G", DeletedEpisodes),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_each_field_is_named(clause: str, model: type[BaseModel]) -> None:
    assert set(model.model_fields) <= named(clause)


def test_each_message_stands_in_the_table_of_its_side() -> None:
    client, server = CLAUSES["D2"].split("What a server sends:")
    for table, messages in ((client, CLIENT_MESSAGES), (server, SERVER_MESSAGES)):
        first = " ".join(re.findall(r"^\| ([^|]*) \|", table, re.M))
        for model in messages:
            (name,) = typing.get_args(model.model_fields["type"].annotation)
            assert f"`{name}`" in first, f"{model.__name__} of type {name}"


def test_each_field_of_what_a_client_says_is_named_with_its_message() -> None:
    table = CLAUSES["D2"].partition("What a server sends:")[0]
    for model in CLIENT_MESSAGES:
        (name,) = typing.get_args(model.model_fields["type"].annotation)
        rows = [row for row in re.findall(r"^\| (`.*) \|$", table, re.M) if row.startswith(f"`{name}`")]
        data = model.model_fields.get("data")
        said = data.annotation if data is not None else None
        said = next(iter(typing.get_args(said)), said) if typing.get_origin(said) is list else said
        if rows and isinstance(said, type) and issubclass(said, BaseModel):
            assert all(f"`{field}`" in rows[0] or f'"{field}"' in rows[0] for field in said.model_fields), name


def test_the_fields_of_both_envelopes_are_named() -> None:
    client = {"if" if field == "condition" else field for field in Envelope.__struct_fields__}
    assert client | set(ServerEnvelope.__struct_fields__) <= named("D1")


def test_kinds_and_classes_are_named() -> None:
    assert {kind.value for kind in ErrorKind} <= named("B1")
    assert {recovery.value for recovery in Recovery} <= named("E2")
    assert f"`error_markers` {VERSION}" in CLAUSES["A1"] and f"Version {VERSION}" in CLAUSES["B"]


def test_numbers_are_what_the_code_has() -> None:
    config, limits = ServerConfig(), ServerLimits()
    assert f"more than {MAX_DEPTH} levels" in CLAUSES["D1"]
    assert f"{limits.max_frame // 2**20} MiB" in CLAUSES["A6"]
    assert f"0 to {MAX_WAIT_S:g} seconds" in CLAUSES["F6"] and f"at most {MAX_MEMBERS:,}" in CLAUSES["F6"]
    bounds = re.sub(r"\s+", " ", CLAUSES["D9"])
    assert f"{config.held_bytes // 2**20} MiB of such requests" in bounds
    assert f"more than {config.high_water_bytes // 2**20} MiB wait" in bounds
    assert f"more than {PART_BYTES // 2**10} KiB" in bounds
    assert f"more than {MESSAGES_AT_ONCE:,} unfinished messages" in bounds


def test_the_table_of_codes_is_what_the_code_says() -> None:
    rows = [
        f"| `{code}` | {info.fault} | {_yes(info.retryable)} | {_yes(info.consumes_id)} | "
        f"{_yes(info.session_survives)} | {info.http_status} |"
        for code, info in CODES.items()
    ]
    assert "\n".join(rows) in CLAUSES["D5"]


def _yes(value: bool) -> str:
    return "yes" if value else "no"
