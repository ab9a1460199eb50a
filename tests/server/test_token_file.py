"""``ERRATA_TOKEN_FILE``: the token in a file, for servers and commands; and what is checked before anything starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from errata_protocol.errors import InvalidRequest, JournalUnavailable
from errata_server.cli import data_dirs
from errata_server.cli.commands import cli, main
from errata_server.cli.source import Source
from errata_server.runtime.data_lock import lock
from errata_server.settings import MAX_TOKEN_FILE, Settings, token_in_environment


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ERRATA_TOKEN", "ERRATA_TOKEN_FILE", "ERRATA_INSECURE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("word\n", ("word",)), ("word", ("word",)), ("a,b\n", ("a", "b")), ("a\nb\r\n\n c \n", ("a", "b", "c"))],
)
def test_a_token_is_read_from_its_file(
    text: str, tokens: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(text, newline="")
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "token"))
    settings = Settings()
    assert settings.tokens == tokens and token_in_environment() == tokens[0]
    assert text.strip() not in repr(settings)
    for name, value in settings.in_environment().items():  # a target that is loaded reads the same ones
        monkeypatch.setenv(name, value)
    assert Settings().tokens == tokens
    if len(tokens) > 1:  # each sees its own episodes: which one is meant?
        with pytest.raises(InvalidRequest, match=f"has {len(tokens)} tokens"):
            Source(None, "http://127.0.0.1:1")
        return
    with Source(None, "http://127.0.0.1:1") as source:
        assert source._headers == {"Authorization": f"Bearer {tokens[0]}"}


def test_a_file_and_another_token_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("word")
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("ERRATA_TOKEN", "other")
    for read in (Settings, token_in_environment):
        with pytest.raises(InvalidRequest, match="set one of them") as caught:
            read()
        assert "word" not in str(caught.value) and "other" not in str(caught.value)
    monkeypatch.setenv("ERRATA_TOKEN", "")
    assert Settings().tokens == ("word",) and token_in_environment() == "word"


def test_a_file_and_a_variable_with_the_same_tokens_are_not_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("a\nb\n")
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("ERRATA_TOKEN", "a, b")
    assert Settings().tokens == ("a", "b") and token_in_environment() == "a"


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_TOKEN_FILE", "")
    assert Settings().tokens == () and token_in_environment() is None
    monkeypatch.setenv("ERRATA_TOKEN", "word")
    assert Settings().tokens == ("word",) and token_in_environment() == "word"


def test_a_command_asks_which_of_several_tokens_it_should_send(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_TOKEN", " a , b")
    with pytest.raises(InvalidRequest, match="set ERRATA_TOKEN to one of them"):
        Source(None, "http://127.0.0.1:1")
    monkeypatch.setenv("ERRATA_TOKEN", " a ")
    with Source(None, "http://127.0.0.1:1") as source:
        assert source._headers == {"Authorization": "Bearer a"}


@pytest.mark.parametrize("text", [" ", ",", "a,", "a,,b"])
def test_an_empty_token_is_refused_by_servers_and_commands(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_TOKEN", text)
    with pytest.raises(ValueError, match="token is empty"):
        Settings()
    with pytest.raises(InvalidRequest, match="token is empty"):
        token_in_environment()


def fifo(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.mkdir(), "directory|regular"),
        (fifo, "regular"),
        (lambda path: path.symlink_to("/dev/zero"), "regular"),
        (lambda path: path.write_bytes(b"x" * (MAX_TOKEN_FILE + 1)), "65,536 bytes"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "ASCII"),
        (lambda path: path.write_text(" \n,\n"), "empty"),
        (lambda path: path.write_text("# of team a\nword\n"), "begins with #"),
        (lambda path: path.write_text("word and word\n"), "has spaces"),
    ],
)
def test_a_file_without_a_token_is_refused_by_name(
    made: object, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(tmp_path / "token")  # type: ignore[operator]
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "token"))
    for read in (Settings, token_in_environment):
        with pytest.raises(InvalidRequest, match=says) as caught:
            read()  # type: ignore[operator]
        assert str(tmp_path / "token") in str(caught.value)


def test_the_option_overrides_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "nothing"))
    arguments = ["serve", "nothing:Here", "--data-dir", str(tmp_path), "--host", "0.0.0.0", "--check"]
    assert CliRunner().invoke(cli, [*arguments, "--token", "word"]).exit_code == 0


def test_a_check_refuses_what_a_server_would_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["errata", "serve", "nothing:Here", "--data-dir", str(tmp_path / "data"), "--check"]

    def checked(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", [*base, *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0)

    assert checked() == 0 and checked("--host", "0.0.0.0", "--insecure") == 0
    assert checked("--host", "0.0.0.0") == 1
    assert "set ERRATA_TOKEN, bind 127.0.0.1, or give --insecure" in capsys.readouterr().err
    (tmp_path / "token").write_text("word")
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "token"))
    assert checked("--host", "0.0.0.0") == 0 and "the settings are valid" in capsys.readouterr().err
    monkeypatch.setenv("ERRATA_TOKEN_FILE", str(tmp_path / "other"))
    assert checked() == 1 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "data").exists()


def test_a_data_directory_that_cannot_be_made_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalUnavailable, match="ERRATA_DATA_DIR=/tmp/errata") as caught:
        lock(tmp_path / "file" / "data")
    assert "\n" not in caught.value.message


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "ERRATA_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a uid without an entry
    with pytest.raises(InvalidRequest, match="ERRATA_DATA_DIR"):
        data_dirs.of_targets(["terminal"])


def test_a_user_without_a_home_can_ask_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_DATA_HOME", "ERRATA_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with Source(None, "http://127.0.0.1:1") as source:
        assert source.is_remote
        with pytest.raises(InvalidRequest, match="--data-dir"):
            _ = source.directory


def test_a_token_given_in_code_stays() -> None:
    assert Settings(token=SecretStr("a,b")).tokens == ("a", "b")
