"""Bytes and schemas of every mux message are what rfcs/schemas and tests/golden/mux hold."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel, ValidationError

from errata_protocol.mux import CLIENT_MESSAGES, SERVER_MESSAGES, schemas
from errata_protocol.mux.envelope import Malformed, read_frame, read_server_frame

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("wire", ROOT / "scripts" / "wire.py")
assert _spec is not None and _spec.loader is not None
wire = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wire)

FILES = wire.files()
MODELS = [("client", model) for model in CLIENT_MESSAGES] + [("server", model) for model in SERVER_MESSAGES]
named = pytest.mark.parametrize(("side", "model"), MODELS, ids=[f"{side}.{m.__name__}" for side, m in MODELS])


def golden(side: str, model: type[BaseModel]) -> bytes:
    return (ROOT / "tests" / "golden" / "mux" / f"{side}.{model.__name__}.json").read_bytes()


def test_the_files_are_what_the_machines_say() -> None:
    wrong = [str(path) for path, text in FILES.items() if not path.exists() or path.read_bytes() != text]
    assert not wrong, (
        "a wire change moves the text, schemas, golden bytes and version together; then: python scripts/wire.py"
    )


def test_there_is_no_file_of_a_message_that_is_gone() -> None:
    present = {path for folder in ("rfcs/schemas", "tests/golden/mux") for path in (ROOT / folder).glob("*.json")}
    assert present == set(FILES)


@named
def test_each_message_has_golden_bytes_that_its_model_and_its_schema_take(side: str, model: type[BaseModel]) -> None:
    text = golden(side, model)
    model.model_validate_json(text)
    schema = dict(schemas())[f"{side}.{model.__name__}"]
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads(text), schema, cls=jsonschema.Draft202012Validator)


@named
def test_the_fast_reader_and_the_model_agree_on_the_golden_bytes(side: str, model: type[BaseModel]) -> None:
    text = golden(side, model)
    if side == "client":
        (element,) = read_frame(text)
        assert not isinstance(element, Malformed)
        envelope, data = element
    else:
        ((envelope, data),) = read_server_frame(text)  # type: ignore[assignment]
    said = json.loads(text)
    assert envelope.type == said["type"]
    assert json.loads(data) == said.get("data", {})
    assert data in text or data == b"{}"


@named
def test_a_message_without_its_type_or_data_is_not_that_message(side: str, model: type[BaseModel]) -> None:
    said = json.loads(golden(side, model))
    schema = dict(schemas())[f"{side}.{model.__name__}"]
    del said["type"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(said, schema)
    with pytest.raises(ValidationError):
        model.model_validate_json(json.dumps(said))


@pytest.mark.parametrize("model", CLIENT_MESSAGES, ids=lambda m: m.__name__)
def test_a_server_refuses_unknown_fields_of_an_envelope(model: type[BaseModel]) -> None:
    text = golden("client", model)[:-1] + b',"more":1}'
    (element,) = read_frame(text)
    assert isinstance(element, Malformed) and element.error.code == "INVALID_ENVELOPE"
    with pytest.raises(ValidationError):
        model.model_validate_json(text)
