"""``--volatile``: paths as messages print them, checked against the observation class at the start."""

from __future__ import annotations

from typing import Any

import pytest
from openenv.core.env_server.types import Observation
from pydantic import BaseModel, Field

from errata_protocol.errors import InvalidRequest
from errata_protocol.payload import semantic_digest
from errata_server.environments.volatile_fields import field_names, resolved, written_by_class


class Block(BaseModel):
    execution_time: float = 0.0
    stdout: str = ""


class Loose(BaseModel):
    model_config = {"extra": "allow"}


class Played(Observation):
    result: Block | None = None
    blocks: list[Block] = Field(default_factory=list)
    by_name: dict[str, Block] = Field(default_factory=dict)
    pairs: tuple[int, Block] | None = None
    open_: Any = None
    loose: Loose | None = None
    text: str = ""


def one(name: str, cls: type[Observation] = Played, mcp: bool = False) -> str:
    ((found,), _) = resolved(field_names(name), [cls], mcp=mcp)
    return found


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("$.observation.result.execution_time", "$.observation.result.execution_time"),
        ("observation.result.execution_time", "$.observation.result.execution_time"),
        ("result.execution_time", "$.observation.result.execution_time"),
        ("blocks[*].execution_time", "$.observation.blocks[*].execution_time"),
        ("$.observation.blocks[3].stdout", "$.observation.blocks[3].stdout"),
        ("by_name.anything.stdout", "$.observation.by_name.anything.stdout"),
        ("pairs[1].stdout", "$.observation.pairs[1].stdout"),
        ("open_.what.ever[3]", "$.observation.open_.what.ever[3]"),
        ("loose.what.ever", "$.observation.loose.what.ever"),
        ("metadata.host.pid", "$.metadata.host.pid"),
        ("$.metadata.host", "$.metadata.host"),
        ("$.observation.metadata.host", "$.observation.metadata.host"),
        ("$.metadata", "$.metadata"),
        ("reward", "$.reward"),
        ("$.reward", "$.reward"),
        ("text", "text"),
        ("stamp", "stamp"),
    ],
)
def test_what_the_observation_can_have_is_taken(given: str, path: str) -> None:
    assert one(given) == path


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("result.took", r"Block has no field 'took'; its fields are: execution_time, stdout"),
        ("$.observation.result.took", r"Block has no field 'took'"),
        ("blocks.execution_time", r"Played.blocks is a list: its items are blocks\[\*\]"),
        ("blocks[*].took", r"Block has no field 'took'"),
        ("$.observation.took", r"Played has no field 'took'; its fields are: blocks, by_name, .*metadata"),
        ("text.took", r"Played.text is a str, which has no fields"),
        ("by_name.x.took", r"Block has no field 'took'"),
        ("pairs[*].took", r"has no field|has no fields"),
        ("$.stdout", r"paths begin with \$.observation"),
        ("$.result.data", r"no tools"),
        ("$", r"nothing of it would be compared"),
        ("$.observation", r"nothing of it would be compared"),
        ("observation", r"nothing of it would be compared"),
        ("done", r"another episode"),
        ("$.done", r"another episode"),
        ("$.observation.reward", r"stands beside the observation, at \$.reward"),
        ("a b", r"is no path"),
    ],
)
def test_what_no_observation_can_have_is_refused_with_what_there_is(given: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        one(given)


def test_a_bare_name_of_no_class_is_taken_for_metadata_and_told() -> None:
    assert resolved(["stamp", "text"], [Played], mcp=False)[1] == ("stamp",)


def test_results_of_tools_have_no_class() -> None:
    assert one("$.result.data.took", mcp=True) == "$.result.data.took"


class Holder(Observation):
    observation: Block | None = None


def test_a_field_called_observation_is_one() -> None:
    assert one("observation.execution_time", Holder) == "$.observation.observation.execution_time"


def test_commas_in_a_quoted_key_do_not_part_it() -> None:
    assert field_names('a,$.metadata["x,y"], b') == ("a", '$.metadata["x,y"]', "b")


def test_a_path_is_left_out_of_the_semantic_digest_and_nothing_beside_it_is() -> None:
    def payload(took: float, stdout: str = "") -> bytes:
        metadata = f'{{"host":{{"pid":{took}}},"kept":1}}'
        block = f'{{"execution_time":{took},"stdout":"{stdout}"}}'
        inner = f'{{"result":{block},"blocks":[{block}],"metadata":{metadata}}}'
        return f'{{"observation":{inner},"reward":1.0,"metadata":{metadata}}}'.encode()

    paths = resolved(["result.execution_time", "blocks[*].execution_time", "metadata.host.pid"], [Played], mcp=False)[0]
    assert semantic_digest(payload(1.5), paths) == semantic_digest(payload(2.5), paths)
    assert semantic_digest(payload(1.5), paths) != semantic_digest(payload(1.5, "x"), paths)
    assert semantic_digest(payload(1.5), paths[:2]) != semantic_digest(payload(2.5), paths[:2])


def test_a_class_may_name_paths_too() -> None:
    assert written_by_class(("took_s", "result.execution_time", "metadata.pid", "$.reward")) == (
        "took_s",
        "$.observation.result.execution_time",
        "$.metadata.pid",
        "$.reward",
    )
