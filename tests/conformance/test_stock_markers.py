"""Markers on a server of released OpenEnv: they need no other server, and released clients see them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openenv import GenericEnvClient
from openenv.core.env_server import create_fastapi_app

from errata_conformance.cli import main

from ..protocol_exchanges import MarkedEnvironment, MarkedObservation, TallyAction
from ..test_rfcs import served


def test_a_released_server_delivers_markers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "probe.json").write_text(json.dumps({"step": [{"n": 2}, {"n": 3}], "marked": [{"do": "mark"}]}))
    with served(create_fastapi_app(MarkedEnvironment, TallyAction, MarkedObservation)) as url:
        status = main([url, "--rfc", "014", "--probe", str(tmp_path / "probe.json"), "--json", "--strict"])
        with GenericEnvClient(base_url=url).sync() as env:
            assert env.reset().observation["error_kind"] is None
            observation = env.step({"do": "mark"}).observation
    report = json.loads(capsys.readouterr().out)
    assert (status, report["broken"]) == (0, [])
    passed = {one["statement"] for one in report["results"] if one["outcome"] == "passed"}
    assert {f"R-014-{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 14)} <= passed
    assert observation["error_kind"] == "command_not_found"
    assert observation["metadata"]["error_site"] == observation["error_site"] == observation["error_sites"][0]
