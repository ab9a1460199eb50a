"""What somebody is told who starts, serves and asks for the first time and leaves out something basic."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from pydantic import SecretStr
from typer.testing import CliRunner

from errata_protocol.errors import ErrataError, InvalidRequest, JournalUnavailable, NotSupported, Unauthorized
from errata_server.app import create_app, create_fastapi_app
from errata_server.cli import commands
from errata_server.doors import auth
from errata_server.environments.volatile_fields import field_names
from errata_server.runtime import runtime
from errata_server.runtime.runtime import Runtime
from errata_server.serve.server import Bind, listen
from errata_server.settings import Settings

from .environments import CountAction, CountEnvironment, CountObservation
from .repeatable import StampedEnvironment

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(autouse=True)
def nothing_was_warned_of() -> Iterator[None]:
    """What is said once in a process is said anew in each test."""
    runtime._warn_of_memory.cache_clear()
    yield


def make_app(**settings: Any) -> FastAPI:
    return create_fastapi_app(CountEnvironment, CountAction, CountObservation, settings=Settings(**settings))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


# -- warnings ---------------------------------------------------------------------------------------------------------


def test_a_journal_in_memory_is_warned_of_once_in_a_process(caplog: pytest.LogCaptureFixture) -> None:
    for app in (make_app(), make_app()):
        with TestClient(app):
            pass
    (said,) = warnings(caplog)
    assert "in memory" in said and "ERRATA_DATA_DIR" in said and "data_dir=" in said


def test_a_journal_on_disk_is_not_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with TestClient(make_app(data_dir=tmp_path)):
        pass
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("peer", "headers", "says"),
    [
        ("192.0.2.7", {}, "loopback only"),
        ("127.0.0.1", {"X-Forwarded-For": "192.0.2.7"}, "came through a proxy"),
        ("127.0.0.1", {"X-Forwarded-For": "192.0.2.7", "Host": "env.example.org"}, "came through a proxy"),
    ],
)
def test_the_first_refusal_for_want_of_a_token_is_logged_with_its_remedy(
    peer: str, headers: dict[str, str], says: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app(data_dir=tmp_path)
    with TestClient(app, client=(peer, 5), base_url="http://localhost:8000") as http:
        assert [http.get("/episodes", headers=headers).status_code for _ in range(2)] == [403, 403]
    (said,) = warnings(caplog)
    assert says in said and "ERRATA_TOKEN" in said and "ERRATA_INSECURE=1" in said


def test_refusals_of_one_kind_are_one_line_a_minute_with_their_number(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    refusals = auth.Refusals(lambda: now[0])
    with caplog.at_level(logging.INFO):
        for now[0] in (0.0, 1.0, 59.0, 60.0):
            refusals.note((401, "UNAUTHORIZED", "no token"), "192.0.2.7")
        refusals.note((403, "FORBIDDEN", "no page"), "192.0.2.8")
    assert caplog.messages == [
        "refused 1 requests (401 UNAUTHORIZED), the last from 192.0.2.7: no token",
        "refused 3 requests (401 UNAUTHORIZED), the last from 192.0.2.7: no token",
        "refused 1 requests (403 FORBIDDEN), the last from 192.0.2.8: no page",
    ]


def test_a_server_with_a_token_warns_of_no_stranger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(data_dir=tmp_path, token=SecretStr("s3cret"))
    with TestClient(app, client=("192.0.2.7", 5)) as http:
        assert http.get("/episodes").status_code == 401
    assert not warnings(caplog)


# -- what is declared in code -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("volatile", ["stamp, elapsed", ["stamp", "elapsed"]])
def test_volatile_fields_are_a_list_or_a_text_with_commas(volatile: Any) -> None:
    assert field_names(volatile) == ("stamp", "elapsed")
    create_app(StampedEnvironment, CountAction, CountObservation, deterministic=True, volatile=volatile)


@pytest.mark.parametrize("volatile", [7, [7], {"stamp": True}.items()])
def test_volatile_fields_of_another_type_are_refused(volatile: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"volatile takes names of fields, \['timestamp', 'elapsed'\]"):
        create_app(StampedEnvironment, CountAction, CountObservation, deterministic=True, volatile=volatile)


def test_volatile_fields_where_nothing_runs_again_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="set deterministic, too"):
        create_app(StampedEnvironment, CountAction, CountObservation, volatile="stamp")


def test_detect_of_another_type_is_refused_under_the_name_it_has_in_code() -> None:
    mapping: Any = {"exit_code": "n"}
    with pytest.raises(InvalidRequest, match=r"^detect takes .* as one text, not \{'exit_code': 'n'\}"):
        create_app(CountEnvironment, CountAction, CountObservation, detect=mapping)
    with pytest.raises(InvalidRequest, match=r"^detect: CountObservation has no field 'nope'"):
        create_app(CountEnvironment, CountAction, CountObservation, detect="exit_code=nope")


# -- data directory, address ------------------------------------------------------------------------------------------


async def test_a_directory_in_use_names_both_remedies(tmp_path: Path) -> None:
    first = Runtime(Settings(data_dir=tmp_path))
    with pytest.raises(JournalUnavailable, match="in use by process") as caught:
        Runtime(Settings(data_dir=tmp_path))
    await first.close()
    for remedy in ("--data-dir", "data_dir=", "ERRATA_DATA_DIR", "--workers 1"):
        assert remedy in caught.value.message


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_this_machines_is_blamed_on_the_host(host: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{host} is not an address of this machine: give another --host"):
        listen(Bind(host, 0))


def test_a_port_in_use_is_blamed_on_the_port() -> None:
    with listen(Bind(port=0)) as taken, pytest.raises(InvalidRequest, match="give another --port"):
        listen(Bind(port=taken.getsockname()[1]))


# -- errata episodes --url --------------------------------------------------------------------------------------------


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve an application from a thread, and yield its address."""
    listening = listen(Bind(port=0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def failure(url: str, **env: str) -> ErrataError:
    error = CliRunner().invoke(commands.cli, ["episodes", "--url", url], env=env).exception
    assert isinstance(error, ErrataError), error
    return error


@pytest.mark.parametrize("url", ["localhost:8000", "127.0.0.1:8000", "ws://127.0.0.1:8000", "http://", ""])
def test_an_address_that_is_none_of_https_is_refused_with_its_form(url: str) -> None:
    error = failure(url)
    assert isinstance(error, InvalidRequest) and "http://HOST:PORT" in error.message and repr(url) in error.message


def test_a_missing_and_a_wrong_token_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ERRATA_TOKEN", raising=False)
    with serving(make_app(token=SecretStr("s3cret"))) as url:
        missing, wrong = failure(url), failure(url, ERRATA_TOKEN="other")
    assert isinstance(missing, Unauthorized) and "needs a token: set ERRATA_TOKEN" in missing.message
    assert isinstance(wrong, Unauthorized) and "refused the token in ERRATA_TOKEN" in wrong.message


def test_a_server_in_production_mode_is_said_to_serve_no_episodes() -> None:
    app = create_fastapi_app(CountEnvironment, CountAction, CountObservation, mode="production")
    with serving(app) as url:
        error = failure(url)
    assert isinstance(error, NotSupported) and "production mode" in error.message and "--data-dir" in error.message


# -- help and settings ------------------------------------------------------------------------------------------------


def test_the_help_of_serve_says_its_defaults() -> None:
    said = " ".join(CliRunner().invoke(commands.cli, ["serve", "--help"], terminal_width=200).output.split())
    for text in ("else 900]", "[default: 10000, or", "ERRATA_DATA_DIR, else", "or production: without", "[,command="):
        assert text in said, text
    assert "Journal to read" not in said


def rows(text: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return {name.strip("`"): rest for name, *rest in cells if name.startswith("`ERRATA_")}


def test_the_page_of_settings_has_every_setting_with_its_default() -> None:
    written = rows((DOCS / "settings.md").read_text())
    assert set(written) == {f"ERRATA_{name.upper()}" for name in Settings.model_fields}
    for name, field in Settings.model_fields.items():
        default, meaning = written[f"ERRATA_{name.upper()}"]
        value = field.get_default(call_default_factory=True)
        assert default == ("none" if value in (None, (), {}) else f"`{str(value).lower()}`"), name
        assert len(meaning) > 20


READERS: dict[str, Callable[[Settings], object]] = {
    "ERRATA_BASE": lambda settings: settings.base["default"],
    "ERRATA_ALLOWED_HOSTS": lambda settings: settings.allowed_hosts,
}


def test_settings_are_read_in_the_forms_that_the_page_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (DOCS / "settings.md").read_text()
    for name, value in (
        ("ERRATA_BASE", '{"default": "/srv/base"}'),
        ("ERRATA_ALLOWED_HOSTS", "env.example.org,10.0.0.7"),
    ):
        assert value in page
        monkeypatch.setenv(name, value)
    found = {name: read(Settings()) for name, read in READERS.items()}
    assert found == {
        "ERRATA_BASE": Path("/srv/base"),
        "ERRATA_ALLOWED_HOSTS": ("env.example.org", "10.0.0.7"),
    }
