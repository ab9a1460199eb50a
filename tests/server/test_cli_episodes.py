"""`errata episodes`, `replay` and `audit`: the action, all owners, all journals, and nothing cut."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr

from errata_client import Connection, ErrataClient
from errata_protocol.episode_lists import EpisodeFilter
from errata_protocol.labels import Labels
from errata_server.app import create_fastapi_app
from errata_server.cli.tables import Column, Table
from errata_server.serve.bundle_server import Archive
from errata_server.settings import Settings

from .command_line import assert_harmless, run
from .conftest import connect
from .environments import CommandAction, CommandEnvironment, CommandObservation
from .local_server import LocalServer, serving

ESCAPES = "ls \x1b[31m\u202egnp\n" + "x" * 500
TARGET = "tests.server.environments:CommandEnvironment"
TOKENS = ("first-token", "second-token")


def application(directory: Path, tokens: tuple[str, ...] = ()) -> Any:
    token = SecretStr(",".join(tokens)) if tokens else None
    return create_fastapi_app(
        CommandEnvironment,
        CommandAction,
        CommandObservation,
        settings=Settings(data_dir=directory, token=token),
    )


def play(directory: Path, *commands: str, token: str | None = None, tokens: tuple[str, ...] = ()) -> str:
    """Play an episode with these commands in a data directory; return its eid."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    with TestClient(application(directory, tokens), headers=headers) as client, connect(client) as socket:
        eid = str(socket.ask("reset", {"task_id": "count-to-three"})["eid"])
        for command in commands:
            socket.ask("step", {"command": command})
        return eid


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ERRATA_DATA_DIR", "ERRATA_TOKEN", "ERRATA_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    return tmp_path / "errata"


@pytest.fixture(params=["directory", "server", "bundle"])
def where(request: pytest.FixtureRequest, data_home: Path) -> Iterator[tuple[str, list[str]]]:
    """An episode and the options with which it is read: in a directory, from a server, from a bundle's server."""
    eid = play(data_home / "one", "head acces.log", "fail", ESCAPES)
    if request.param == "directory":
        yield eid, ["--data-dir", str(data_home / "one")]
    elif request.param == "server":
        with LocalServer(TARGET, data_home / "one") as server:
            yield eid, ["--url", server.url]
    else:
        from errata_server.serve.bundle_server import Archive, archive_app

        file = data_home / "bundle.jsonl"
        assert run("episodes", "export", eid, "-o", str(file), "--data-dir", str(data_home / "one")).status == 0
        with serving(archive_app(Archive([file]), Settings())) as url:
            yield eid, ["--url", url]


def printed(*arguments: str) -> str:
    ended = run(*arguments)
    assert ended.status == 0, ended
    assert_harmless(ended)
    return ended.stdout


# -- replay: what the agent did ----------------------------------------------------------------------------------------


def test_replay_shows_the_action_the_outcome_and_the_place_of_the_error(where: tuple[str, list[str]]) -> None:
    eid, options = where
    head, columns, reset, wrong, failed, escaped, last = printed("replay", eid, *options).splitlines()
    assert eid in head and "CommandEnvironment" in head and "task count-to-three" in head
    assert columns.split() == ["t", "action", "exit", "reward", "kind", "site", "hint", "key", "took"]
    assert reset.split()[:2] == ["0", "reset"] and "count-to-three" in reset
    for part in ("1", "head «acces.log»", "path_not_found", "«acces.log»", "0.25 s"):
        assert part in wrong
    assert wrong.index("head") < wrong.index(" 2 ") < wrong.index("path_not_found")  # exit code 2
    assert "RuntimeError" in failed or "EXECUTION_ERROR" in failed
    assert escaped.count("x" * 500) == 1 and "\\x1b[31m\\u202egnp\\n" in escaped
    assert last.startswith("3 turns, 1 failed requests, reward")


def test_replay_as_json_has_a_line_for_each_turn(where: tuple[str, list[str]]) -> None:
    eid, options = where
    lines = [json.loads(line) for line in printed("replay", eid, "--json", *options).splitlines()]
    assert [line["t"] for line in lines] == [0, 1, None, 2] and {line["eid"] for line in lines} == {eid}
    wrong = lines[1]
    assert wrong["action"] == {"command": "head acces.log"} and wrong["exit_code"] == 2
    assert wrong["error_site"]["action_span"] == [5, 14] and wrong["error_kind"] == "path_not_found"
    assert wrong["duration_s"] == 0.25 and wrong["created"] > 1e9 and wrong["digest"].startswith("sha256:")
    assert lines[2]["error"] == "EXECUTION_ERROR"


def test_replay_in_full_shows_what_the_agent_read(where: tuple[str, list[str]]) -> None:
    eid, options = where
    text = printed("replay", eid, "--full", *options)
    assert "head: acces.log: No such file" in text and text.count("\n") > 8
    lines = [json.loads(line) for line in printed("replay", eid, "--full", "--json", *options).splitlines()]
    assert "No such file" in lines[1]["agent_text"]


def test_the_exact_request_of_a_turn_is_printed(where: tuple[str, list[str]]) -> None:
    eid, options = where
    assert printed("replay", eid, "1", "--action", *options) == '{"command":"head acces.log"}'
    assert json.loads(printed("replay", eid, "2", "--action", "--json", *options)) == {
        "eid": eid,
        "t": 2,
        "action": {"command": ESCAPES},
    }
    assert "has deliveries 0..2" in run("replay", eid, "7", "--action", *options).stderr


def test_a_server_knows_which_open_sessions_have_a_connection_and_a_directory_does_not(data_home: Path) -> None:
    async def leave(url: str) -> str | None:
        async with Connection(url) as connection:
            client: ErrataClient[Any, Any, Any] = ErrataClient(connection=connection)
            await client.reset()
            client.ticket()  # the session is not closed with its connection
            return client.eid

    with LocalServer(TARGET, data_home / "one") as server:
        eid = asyncio.run(leave(server.url))

        def listed(status: str, *where: str) -> bool:
            ended = run("episodes", "--status", status, *where)
            assert ended.status == 0, ended
            return str(eid) in ended.stdout

        while not listed("detached", "--url", server.url):  # the socket's end has to arrive
            pass
        assert not listed("open", "--url", server.url)
        assert listed("open", "--data-dir", str(data_home / "one"))
        assert not listed("detached", "--data-dir", str(data_home / "one"))


def test_the_list_shows_the_task_the_status_the_errors_and_nothing_cut(where: tuple[str, list[str]]) -> None:
    eid, options = where
    columns, row = printed("episodes", *options).splitlines()
    assert columns.split()[:8] == ["eid", "environment", "task", "turns", "reward", "status", "errors", "last"]
    for part in (eid, "CommandEnvironment", "count-to-three", "path_not_found:1"):
        assert part in row
    if "--data-dir" in options:
        assert "owner" in columns and " closed " in row
    (listed,) = json.loads(printed("episodes", "--json", *options))["episodes"]
    assert listed["task"] == "count-to-three" and listed["last"] >= listed["created"]


def test_options_that_do_not_go_together_are_refused(data_home: Path) -> None:
    eid = play(data_home / "one", "ls")
    assert "leave T out" in run("replay", eid, "1", "--full").stderr
    assert "give --full" in run("replay", eid, "--agent-text").stderr
    assert "give T" in run("replay", eid, "--action").stderr
    assert "not --agent-text" in run("replay", eid, "1", "--action", "--agent-text").stderr


def test_replay_holds_one_turn_at_a_time(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 turns the widest moment holds no more rows than the table keeps for its widths."""
    from errata_server.cli import tables, turns

    eid = play(data_home / "one", *["ls"] * 1000)
    monkeypatch.setattr(tables, "_ROWS", 10)
    held = 0
    add = tables.Table.add

    def counted(self: Table, *cells: str, below: str | None = None) -> None:
        nonlocal held
        add(self, *cells, below=below)
        held = max(held, len(self._rows))

    monkeypatch.setattr(tables.Table, "add", counted)
    parts: list[int] = []
    write = turns._Lines.write

    def small(self: Any, part: bytes) -> None:
        write(self, part)
        parts.append(sum(map(len, self._parts)))

    monkeypatch.setattr(turns._Lines, "write", small)
    assert printed("replay", eid, "--data-dir", str(data_home / "one")).count("\n") == 1004
    assert held < 10 and max(parts) < 10_000


# -- owners ------------------------------------------------------------------------------------------------------------


def with_two_owners(directory: Path) -> list[str]:
    return [play(directory, "head acces.log", token=token, tokens=TOKENS) for token in TOKENS]


@pytest.mark.parametrize("token", [None, "first-token", "first-token,second-token", "another"])
def test_whoever_reads_the_directory_sees_all_owners(
    token: str | None, data_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eids = with_two_owners(data_home / "one")
    if token is not None:
        monkeypatch.setenv("ERRATA_TOKEN", token)
    listed = json.loads(printed("episodes", "--json"))["episodes"]
    assert {e["eid"] for e in listed} == set(eids) and len({e["owner"] for e in listed}) == 2
    rows = printed("episodes").splitlines()
    assert all(e["owner"][:12] in "\n".join(rows) for e in listed)
    for eid in eids:
        assert eid in printed("replay", eid) and eid in printed("replay", eid, "0", "--json")
        printed("episodes", "rewards", eid)
        printed("episodes", "reward", eid, "1", "0.5", "--source", "grader")
    audited = json.loads(printed("audit", "--json"))
    assert audited["total"]["episodes"] == 2 and len(audited["owners"]) == 2
    assert run("audit", "--max-per-1000", "1").status == 0
    assert json.loads(printed("episodes", "delete", *eids, "--json")) == dict.fromkeys(eids, 2)


def test_over_http_one_token_decides_and_several_are_refused(data_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = with_two_owners(data_home / "one")
    with LocalServer(TARGET, data_home / "one", Settings(token=SecretStr(",".join(TOKENS)))) as server:
        monkeypatch.setenv("ERRATA_TOKEN", TOKENS[0])
        seen = json.loads(printed("audit", "--json", "--url", server.url))
        assert seen["total"]["episodes"] == 1 and "shows to this token" in seen["source"]
        assert [e["eid"] for e in json.loads(printed("episodes", "--json", "--url", server.url))["episodes"]] == [first]
        assert "no episode" in run("replay", second, "--url", server.url).stderr
        monkeypatch.setenv("ERRATA_TOKEN", ",".join(TOKENS))
        for command in (["episodes"], ["audit"], ["replay", first]):
            ended = run(*command, "--url", server.url)
            assert ended.status == 1 and "has 2 tokens" in ended.stderr and "--data-dir" in ended.stderr


@pytest.mark.parametrize("bound", ["0", "1", "1000"])
def test_an_audit_that_looked_at_nothing_does_not_pass(bound: str, data_home: Path) -> None:
    with_two_owners(data_home / "one")
    ended = run("audit", "--max-per-1000", bound, "--environment", "markign")
    assert ended.status == 1 and "nothing was audited" in ended.stderr
    unused(data_home / "two")
    ended = run("audit", "--max-per-1000", bound, "--data-dir", str(data_home / "two"))
    assert ended.status == 1, ended


@pytest.mark.parametrize("bound", ["nan", "inf", "-1", "1001", "x"])
def test_a_bound_that_nothing_exceeds_is_refused(bound: str, data_home: Path) -> None:
    assert run("audit", f"--max-per-1000={bound}").status == 2


# -- several journals --------------------------------------------------------------------------------------------------


def unused(directory: Path) -> None:
    """Make a data directory as a server leaves it that was never used."""
    with TestClient(application(directory)):
        pass


def test_the_journals_of_several_directories_are_one_list(data_home: Path) -> None:
    unused(data_home / "a-unused")
    (data_home / "an-empty" / "journal").mkdir(parents=True)
    made = [play(data_home / name, "ls") for name in ("b", "c", "b", "d", "c")]
    page = json.loads(printed("episodes", "--json"))
    assert [e["eid"] for e in page["episodes"]] == made[::-1] and page["next"] is None
    assert "journal" in printed("episodes").splitlines()[0]
    for options in ([], ["--data-dir", str(data_home)]):
        for eid in made:
            assert eid in printed("replay", eid, *options)
    assert json.loads(printed("audit", "--json"))["total"]["episodes"] == 5
    assert json.loads(printed("journal", "size", "--json"))["total"]["episodes"] == 5
    assert json.loads(printed("journal", "verify", "--json"))["episodes"] == 5
    out = data_home / "rollouts.jsonl"
    assert json.loads(printed("journal", "export", "-o", str(out), "--json", "--by", "episode"))["rows"] == 5
    assert "give --data-dir with one of" in run("journal", "retention", "--keep-days", "1").stderr
    assert run("replay", "ep_of_nobody").stderr.startswith("errata: no episode")
    for command in (["delete"], ["export", "-o", str(out)]):
        assert "one directory at a time" in run("episodes", *command, made[0], made[1]).stderr
    assert json.loads(printed("episodes", "delete", made[3], "--json")) == {made[3]: 2}
    own = play(data_home, "ls")  # as an earlier version made it: beside those below it
    assert own in printed("episodes") and made[0] in printed("episodes", "--data-dir", str(data_home))
    assert '"kept": 1,' in printed("journal", "retention", "--keep-days", "1", "--json", "--data-dir", str(data_home))


@pytest.mark.parametrize("limit", ["1", "2", "3"])
def test_the_pages_of_several_journals_have_each_episode_once(limit: str, data_home: Path) -> None:
    made = [play(data_home / name, "ls") for name in ("b", "c", "b", "b", "d")]
    found, cursor = [], []
    for _ in range(6):
        page = json.loads(printed("episodes", "--json", "--limit", limit, *cursor))
        found += [e["eid"] for e in page["episodes"]]
        if page["next"] is None:
            break
        cursor = ["--cursor", page["next"]]
    assert found == made[::-1]
    by_reward = json.loads(printed("episodes", "--json", "--limit", limit, "--sort", "reward"))["next"]
    assert "of another list" in run("episodes", "--cursor", by_reward).stderr
    assert run("episodes", "--cursor", "s.s").status == 2
    assert run("episodes", "--cursor", "x").status == 2


def test_a_list_is_filtered_and_sorted_over_all_journals(data_home: Path) -> None:
    made = [play(data_home / name, *["ls"] * turns) for name, turns in (("b", 3), ("c", 1), ("b", 2))]

    def listed(*options: str) -> list[str]:
        return [e["eid"] for e in json.loads(printed("episodes", "--json", *options))["episodes"]]

    assert listed("--sort", "deliveries") == [made[0], made[2], made[1]]
    assert listed("--sort", "deliveries", "--order", "asc") == [made[1], made[2], made[0]]
    assert listed("--text", made[2].upper()) == [made[2]] and listed("--task", "none") == []
    assert listed("--created-from", "1h") == made[::-1] and listed("--created-before", "2026-05-01") == []
    assert listed("--status", "lost") == [] == listed("--reward-min", "1e9") and len(listed("--reward-max", "1e9")) == 3
    for wrong in (("--sort", "eid"), ("--order", "down"), ("--status", "running"), ("--last-from", "soon")):
        assert run("episodes", *wrong).status == 2


def test_a_list_without_episodes_says_what_was_read(data_home: Path) -> None:
    play(data_home / "one")
    ended = run("episodes", "--environment", "another")
    assert ended.status == 0 and str(data_home / "one") in ended.stderr


def test_a_journal_whose_segments_are_gone_is_not_taken_for_unused(data_home: Path) -> None:
    play(data_home / "one")
    play(data_home / "two")
    for segment in (data_home / "two" / "journal").glob("*.log"):
        segment.unlink()
    ended = run("episodes")
    assert ended.status == 1 and "two" in ended.stderr


# -- tables ------------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def table(file: io.StringIO) -> list[str]:
    made = Table(Column("eid", whole=True), "action", Column("n", right=True), file=file)
    made.add("ep_" + "e" * 40, "a" * 300 + "\x1b[31m", "7")
    made.add("ep_x", "漢字" * 5, "12", below="two\nlines \x07")
    made.end()
    return file.getvalue().splitlines()


def test_only_at_a_terminal_is_a_cell_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    heading, long, wide, *below = table(io.StringIO())
    assert "a" * 300 + "\\x1b[31m" in long and wide.split() == ["ep_x", "漢字" * 5, "12"]
    assert below == ["    two", "    lines \\x07"]
    heading, long, wide, *_ = table(Terminal())
    assert "ep_" + "e" * 40 in long and "…" in long and len(long) <= 80
    assert wide.rstrip().endswith("12") and heading.split() == ["eid", "action", "n"]


def test_episodes_add_up_over_all_journals_and_over_http_alike(data_home: Path) -> None:
    play(data_home / "one", "head none", "fail")
    play(data_home / "one", "ls")
    play(data_home / "two", "head none")
    (bucket,) = json.loads(printed("episodes", "--sums", "--bucket", "366d", "--json"))["buckets"]
    assert (bucket["episodes"], bucket["deliveries"], bucket["error_kinds"]["path_not_found"]) == (3, 6, 2)
    header, *lines = printed("episodes", "--sums").splitlines()
    assert header.split() == ["from", "(UTC)", "episodes", "done", "turns", "mean", "reward", "errors"]
    assert "path_not_found:2" in " ".join(lines)
    filtered = json.loads(printed("episodes", "--sums", "--error-kind", "none", "--json"))
    assert filtered == {"bucket_s": 86_400, "buckets": []}
    assert "no such episode" in run("episodes", "--sums", "--error-kind", "none").stderr
    with LocalServer(TARGET, data_home / "one") as server:
        for where in (["--url", server.url], ["--data-dir", str(data_home / "one")]):
            (bucket,) = json.loads(printed("episodes", "--sums", "--bucket", "366d", "--json", *where))["buckets"]
            assert (bucket["episodes"], bucket["deliveries"]) == (2, 4)


async def test_replay_of_a_fork_begins_with_where_it_was_forked(data_home: Path) -> None:
    with LocalServer("tests.server.environments:CountEnvironment", data_home / "one") as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            async with await client.fork(0) as child:
                await child.step({"n": 2})
                of, eid = client.eid, str(child.eid)
        for where in (["--url", server.url], ["--data-dir", str(data_home / "one")]):
            head, _, forked, step, _ = (await asyncio.to_thread(printed, "replay", eid, *where)).splitlines()
            assert f"forked from {of} at t=0" in head
            assert f"fork of {of} at t=0" in forked and "request_id" not in forked and "key" not in forked
            assert "reset" in (await asyncio.to_thread(printed, "replay", str(of), *where)).splitlines()[2]
            first, _ = (await asyncio.to_thread(printed, "replay", eid, "--json", *where)).splitlines()
            assert json.loads(first)["action"]["t"] == 0, "the request as it was"
            assert step.split()[0] == "1"


async def test_the_forks_of_an_episode_are_listed_from_every_source(data_home: Path) -> None:
    with LocalServer("tests.server.environments:CountEnvironment", data_home / "one") as server:
        async with ErrataClient(server.url) as client:
            await client.reset()
            children = [await client.fork(0), await client.fork(0)]
            grandchild = await children[0].fork(0)
            made, of = [child.eid for child in children], client.eid
            assert of is not None and grandchild.eid is not None
        for where in (["--url", server.url], ["--data-dir", str(data_home / "one")]):
            found = json.loads(await asyncio.to_thread(printed, "episodes", "--origin", of, "--json", *where))[
                "episodes"
            ]
            assert {one["eid"] for one in found} == set(made)
            assert all(one["origin"] == {"eid": of, "t": 0} for one in found)
            assert (await asyncio.to_thread(printed, "episodes", "--origin", grandchild.eid, *where)).count("ep_") == 0
        bundle = httpx.get(f"{server.url}/episodes/{grandchild.eid}/bundle").content
    (data_home / "file").write_bytes(bundle)
    archive = Archive([data_home / "file"])
    page = await archive.page(limit=9, cursor=None, wanted=EpisodeFilter(origin=made[0]), principal=None)
    assert [one.eid for one in page.episodes] == [grandchild.eid]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--bucket", "1h"], "--sums"),
        (["--sums", "--bucket", "0"], "length of time"),
        (["--sums", "--bucket", "367d"], "length of time"),
        (["--sums", "--bucket", "1w"], "length of time"),
        (["--sums", "--limit", "5"], "--limit"),
        (["--sums", "--order", "asc"], "--order"),
        (["--step", "-1"], "--step"),
    ],
)
def test_options_of_sums_that_do_not_fit_are_named(given: list[str], told: str, data_home: Path) -> None:
    play(data_home / "one")
    refused = run("episodes", *given)
    assert refused.status == 2 and told in refused.stderr


def test_labels_filter_the_list(data_home: Path) -> None:
    with LocalServer(TARGET, data_home / "one") as server:
        made = {}
        for step in (1, 2):
            labels = Labels(run="r", step=step, group=f"g{step}")
            with ErrataClient(server.url, labels=labels).sync() as client:
                client.reset()
                made[step] = client.eid
    for given in (["--step", "2"], ["--group", "g2"], ["--run", "r", "--step", "2"]):
        assert [one["eid"] for one in json.loads(printed("episodes", "--json", *given))["episodes"]] == [made[2]]
    assert len(json.loads(printed("episodes", "--json", "--run", "r"))["episodes"]) == 2
