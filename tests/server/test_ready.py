"""``/ready`` names what cannot be used, and stays green for one bad part."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from errata_protocol.environment import EnvironmentSpec
from errata_server.app import create_fastapi_app
from errata_server.runtime import readiness
from errata_server.runtime.readiness import Readiness
from errata_server.serve.bundle_server import Archive, archive_app
from errata_server.settings import Settings

from .environments import CountAction, CountEnvironment, CountObservation

BROKEN: dict[str, str] = {}


def broken() -> Mapping[str, str]:
    """Stand for an environment's function."""
    if "raise" in BROKEN:
        raise RecursionError("\x1b[2J")
    return BROKEN


def client(**settings: Any) -> TestClient:
    spec = EnvironmentSpec("count", "x:y", CountAction, CountObservation, unusable=f"{__name__}:broken")
    return TestClient(
        create_fastapi_app(
            CountEnvironment, CountAction, CountObservation, env_name="count", spec=spec, settings=Settings(**settings)
        )
    )


def test_a_part_that_cannot_be_used_is_named_and_the_server_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BROKEN", {})
    with client() as http:
        assert http.get("/ready").json() == {"status": "ready", "reasons": []}
        BROKEN["bad"] = "task bad: \x1b[2J"
        answer = http.get("/ready")
        assert answer.status_code == 200
        assert answer.json() == {"status": "ready", "reasons": [], "unusable": {"count": ["task bad: \\x1b[2J"]}}
        BROKEN.update({str(n): "x" for n in range(500)})
        assert len(http.get("/ready").json()["unusable"]["count"]) == 101
        BROKEN["raise"] = ""
        answer = http.get("/ready")
        assert answer.status_code == 200 and "RecursionError: \\x1b[2J" in answer.json()["unusable"]["count"][0]


def test_names_are_told_to_those_with_a_token_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.BROKEN", {"bad": "task bad: secret"})
    with client(token=SecretStr("t")) as http:
        assert http.get("/ready").json()["unusable"] == {"count": ["1 cannot be used: ask with a token for which"]}
        told = http.get("/ready", headers={"Authorization": "Bearer t"}).json()
        assert told["unusable"] == {"count": ["task bad: secret"]}


async def test_reading_that_takes_long_does_not_hold_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "_WAIT_S", 0.01)
    checks, go = Readiness(), threading.Event()

    def slow() -> Mapping[str, str]:
        assert go.wait(60)
        return {"bad": "why"}

    checks.tell("count", slow)
    try:
        assert await checks.unusable(details=True) == {}, "what was known before"
    finally:
        go.set()
    while not (found := await checks.unusable(details=True)):
        pass
    assert found == {"count": ["why"]}


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (ValueError("no"), "ValueError: no"),
    ],
)
async def test_an_exception_of_an_environment_is_what_is_wrong_with_it(error: BaseException, says: str) -> None:
    checks = Readiness()

    def raises() -> Mapping[str, str]:
        raise error

    checks.tell("count", raises)
    checks.tell("other", lambda: {"bad": "why"})
    assert await checks.unusable(details=True) == {
        "count": [f"what it offers cannot be read ({says})"],
        "other": ["why"],
    }


def test_one_bad_bundle_stays_one(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(
        b'{"record":"bundle","format":"errata-bundle","version":1,"created":0,"server":"x","episodes":[]}\n'
        b'{"record":"end","records":1,"sha256":""}\n'
    )
    bad.write_bytes(b"\x1b[2J")
    archive = Archive([good, bad, tmp_path / "missing"])
    assert set(archive.broken) == {str(bad), str(tmp_path / "missing")}
    with TestClient(archive_app(archive, Settings())) as http:
        told = http.get("/ready").json()["unusable"]["bundles"]
    assert len(told) == 2 and all(text.isprintable() for text in told)
    with pytest.raises(Exception, match="no episode bundle"):
        Archive([bad])
