"""A server offers the conformance kit's probe that an environment's package has beside its manifest."""

from __future__ import annotations

import json
import logging
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from errata_server.app import create_fastapi_app
from errata_server.environments.conformance_probe import probe_of

from .environments import CountAction, CountEnvironment, CountObservation
from .test_reexecute import served

PROBE = {"step": [{"n": 2}, {"n": 3}]}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of an environment in a package directory with a manifest; its file is `tmp_path`/server/own.py."""
    (tmp_path / "server").mkdir()
    (tmp_path / "validation").mkdir()
    (tmp_path / "openenv.yaml").write_text("name: own\n")
    file = tmp_path / "server" / "own.py"
    file.write_text("from tests.server.environments import CountEnvironment\nclass Own(CountEnvironment): pass\n")
    spec = spec_from_file_location("an_own_environment", file)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_the_probe_beside_the_manifest_is_offered(package: Any, tmp_path: Path) -> None:
    (tmp_path / "validation" / "conformance.json").write_text(json.dumps(PROBE))
    with TestClient(served(package.Own)) as client:
        assert client.get("/conformance/probe").json() == PROBE
    production = create_fastapi_app(package.Own, CountAction, CountObservation, mode="production")
    with TestClient(production) as client:
        assert client.get("/conformance/probe").json() == PROBE


def test_without_a_probe_nothing_is_offered(package: Any) -> None:
    for env in (package.Own, CountEnvironment):
        with TestClient(served(env)) as client:
            assert client.get("/conformance/probe").status_code == 404


@pytest.mark.parametrize(("text", "why"), [("{", "Expecting property name"), ("[]", "it is no JSON object")])
def test_a_probe_that_cannot_be_read_is_named(
    text: str, why: str, package: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "validation" / "conformance.json"
    file.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert probe_of(package.Own, CountAction) is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert str(file) in said and why in said
