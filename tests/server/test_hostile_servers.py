"""Every command that reads from a URL, against every server that is none of ours or means harm."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from errata_protocol.errors import JournalUnavailable, RemoteProtocolError
from errata_protocol.replay import EpisodeDetail, EpisodePage
from errata_server.cli import answers, audit, source

from ..machine_speed import SLOWDOWN
from .command_line import Command, Parameter, all_commands, assert_harmless, assert_refused, run
from .hostile_servers import EPISODE, REFUSED, STRANGE, WAITS, hostile_server

SAMPLES = {
    "eid": "ep_x",
    "eids": "ep_x",
    "t": "0",
    "value": "0.5",
    "source": "judge",
    "target": "tests.server.environments:CountEnvironment",
    "output": "{tmp}/out",
}
"""Values of required parameters by name. A new command with another one fails here until it has a value."""

ALSO: dict[str, list[list[str]]] = {
    "replay": [[], ["0"], ["0", "--json"], ["0", "--agent-text"], ["--json"], ["--full"], ["--full", "--json"]],
    "probe": [["--episode", "ep_x"]],
    "conformance": [["--only", "R-016-2", "base.connect", "--timeout", "0.5", "--quiet"]],
}
"""Further arguments of a command, where its URL is read only with them or in several ways."""

REPORTS = {"conformance"}
"""Commands that judge a server: what is wrong with it is their report, on standard output."""


def reads_url(parameter: Parameter) -> bool:
    """Return whether a parameter takes the URL of a server to read from."""
    return "url" in parameter.name or "url" in parameter.takes.split()


def calls() -> Iterator[tuple[str, Command, Parameter, list[str]]]:
    for command in all_commands():
        for parameter in filter(reads_url, command.parameters):
            for number, also in enumerate(ALSO.get(str(command), [[], ["--json"]])):
                yield f"{command} {number}", command, parameter, also


CALLS = {name: rest for name, *rest in calls()}


@functools.cache
def _required(command: Command, parameter: Parameter) -> tuple[str, ...]:
    needed = [one for one in command.parameters if one.required and one != parameter]
    return tuple(word for one in needed for word in one.given(SAMPLES[one.name]))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with hostile_server() as url:
        yield url


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TOTAL_S", 30.0)
    monkeypatch.setattr(answers, "MAX_BYTES", 4 * 1024**2)
    monkeypatch.setattr(audit, "MAX_PAGES", 20)
    monkeypatch.setattr(source, "MAX_BUNDLE_BYTES", 4 * 1024**2)
    monkeypatch.delenv("ERRATA_TOKEN", raising=False)


def called(call: str, url: str, directory: Path) -> list[str]:
    command, parameter, also = CALLS[call]
    words = [*command.words, *_required(command, parameter), *also, *parameter.given(url)]
    return [word.replace("{tmp}", str(directory)) for word in words]


def test_the_commands_that_read_a_url_are_found() -> None:
    assert {call.rpartition(" ")[0] for call in CALLS} >= {
        *("audit", "conformance", "episodes export", "episodes", "episodes delete", "episodes reward"),
        *("episodes rewards", "episodes show", "probe", "replay"),
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_server_that_is_none_of_ours_is_refused_in_one_line(
    call: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for answer in REFUSED:
        waits = answer in WAITS
        if waits and not call.endswith(" 0"):
            continue  # the same request as in the first way to call the command
        monkeypatch.setattr(answers, "TOTAL_S", 0.2 if waits else 30.0)
        ended = run(*called(call, server + answer, tmp_path))
        try:
            if call.split()[0] in REPORTS:
                assert_harmless(ended)
                assert ended.status in (0, 1, 2)
            else:
                assert_refused(ended)
        except AssertionError as error:
            raise AssertionError(f"{call} with the server {answer!r}: {error}") from error
        assert not list(tmp_path.iterdir()), "nothing is left of an answer that was refused"


@pytest.mark.parametrize("call", CALLS)
def test_text_of_a_server_never_acts_on_the_terminal(call: str, server: str, tmp_path: Path) -> None:
    for answer in STRANGE:
        ended = run(*called(call, server + answer, tmp_path))
        try:
            assert_harmless(ended)
            assert ended.status in (0, 1, 2)
        except AssertionError as error:
            raise AssertionError(f"{call} with the server {answer!r}: {error}") from error


@pytest.mark.parametrize(
    ("cursors", "episodes", "says"),
    [
        (itertools.repeat("5"), [EPISODE], "the page '5' came before"),
        (map(str, itertools.count()), [], "a page without episodes leads to the page '0'"),
        (map(str, itertools.count()), [EPISODE], "more than 20 pages"),
    ],
)
def test_an_audit_of_a_list_without_end_ends(
    cursors: Iterator[str], episodes: list[dict[str, Any]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def page(self: source.Source, query: dict[str, Any]) -> EpisodePage:
        asked.append(query["cursor"])
        return EpisodePage.model_validate({"episodes": episodes, "next": next(cursors)})

    monkeypatch.setattr(source.Source, "page", page)
    monkeypatch.setattr(source.Source, "detail", lambda self, eid: EpisodeDetail(**episodes[0], turns=[]))
    monkeypatch.setattr(source.Source, "rewards", lambda self, eid: [])
    ended = run("audit", "--url", "http://127.0.0.1:9")
    assert_refused(ended)
    assert says in ended.stderr
    assert asked == [None, *asked[1:]] and len(asked) <= 20


def test_no_server_at_all_is_said(tmp_path: Path) -> None:
    for call in CALLS:
        ended = run(*called(call, "http://127.0.0.1:9", tmp_path))
        assert_refused(ended)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://x", "http://", "http://[::1", "x", "", "http://\x1b[2J"])
def test_what_is_no_url_is_refused(url: str, tmp_path: Path) -> None:
    for call in CALLS:
        if call.split()[0] not in REPORTS:
            assert_refused(run(*called(call, url, tmp_path)))


def test_a_slow_download_ends_and_a_steady_one_does_not(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "TOTAL_S", 0.3 * SLOWDOWN)
    with pytest.raises(JournalUnavailable, match="in time"):
        answers.download(f"{server}drips-body", {}, None, lambda part: None, 1024**2)
    got: list[bytes] = []
    monkeypatch.setattr(answers, "MIN_BYTES_PER_S", 1)  # then every byte adds a second
    with pytest.raises(RemoteProtocolError, match="more than 50 bytes"):
        answers.download(f"{server}drips-body", {}, None, got.append, 50)
    assert len(b"".join(got)) == 50
