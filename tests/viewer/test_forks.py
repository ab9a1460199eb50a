"""A person looks at forks: the family as a tree, two members side by side, and a fork of their own, which is played."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pydantic import SecretStr

from errata_client import Episodes, ErrataClient
from errata_protocol import EpisodeFilter, Labels
from errata_server.cli.source import runtime_for_reading
from errata_server.runtime.changes import Changes
from errata_server.serve.journal_server import journal_app
from errata_server.settings import Settings
from tests.hangs import HANGS_S

from ..browser.chromium import Page
from ..server.local_server import LocalServer, serving
from .test_episode import SHELL
from .test_login import log_in
from .visits import IN_CHROMIUM, press, shown

pytestmark = IN_CHROMIUM

MEMBERS = "[...document.querySelectorAll('.member')].map((each) => each.querySelector('.eid').innerText)"
LOADED = "document.querySelector('main [role=status]')?.innerText.includes('loading') === false"
PLACES = "[...document.querySelectorAll('.sides tbody th')].map((each) => each.innerText.replace('\\n', ' '))"
BUTTON = "[...document.querySelectorAll('button')].find((each) => each.innerText.startsWith('%s'))"
COMMAND = "document.querySelector('.command[aria-label^=\"%s\"]')?.textContent"
COUNT = "tests.server.environments:CountEnvironment"


class Family:
    """Episodes of one family: ``parent`` of seven turns, ``child`` from its t=3, ``sibling`` from its t=2, and
    ``grandchild`` from t=1 of the child."""

    url: str
    parent: str
    child: str
    sibling: str
    grandchild: str


async def play(env: ErrataClient, *commands: str) -> None:
    for command in commands:
        await env.step({"command": command})


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def server(data_dir: Path) -> Iterator[LocalServer]:
    with LocalServer(SHELL, data_dir) as server:
        yield server


@pytest.fixture(scope="module")
def family(server: LocalServer) -> Family:
    made = Family()
    made.url = server.url
    with ErrataClient(server.url).sync() as env:
        env.reset(task="repair")
        for command in ("a", "b", "c", "fail it!", "ls", "done"):
            env.step({"command": command})
        made.parent = str(env.eid)
        for name, t, commands in (("child", 3, ("fail it!", "other", "done")), ("sibling", 2, ("c", "x"))):
            with env.fork(t) as fork:
                for command in commands:
                    fork.step({"command": command})
                setattr(made, name, fork.eid)
                if name == "child":
                    with fork.fork(1) as inner:
                        inner.step({"command": "fail deep!"})
                        made.grandchild = str(inner.eid)
    return made


@pytest.mark.parametrize("of", ["parent", "child", "sibling", "grandchild"])
async def test_the_family_is_a_tree_whichever_member_it_is_asked_of(family: Family, page: Page, of: str) -> None:
    eid = getattr(family, of)
    await page.open(f"{family.url}/viewer/#{eid}")
    await page.click("[...document.querySelectorAll('nav a')].find((each) => each.innerText === 'Forks')")
    await page.until(f"{MEMBERS}.length === 4 && {LOADED}")
    assert await page.evaluate("location.hash") == f"#forks/{eid}"
    assert await page.evaluate(MEMBERS) == [family.parent, family.child, family.grandchild, family.sibling]
    depths = "[...document.querySelectorAll('.member')].map((each) => each.closest('li').querySelectorAll('li').length)"
    assert await page.evaluate(depths) == [3, 1, 0, 0]
    chosen = await page.evaluate("document.querySelector('.member[aria-current=true]').innerText")
    assert chosen.startswith(eid)
    said = await page.evaluate("document.querySelector('.tree').innerText")
    for text in ("from t=3", "from t=2", "from t=1", "command_not_found 1", "reward 0.9", "reward 0.6", "done"):
        assert text in said, text


async def test_members_are_compared_from_where_they_part(family: Family, page: Page) -> None:
    await page.open(f"{family.url}/viewer/#forks/{family.parent}")
    await page.until(f"{MEMBERS}.length === 4 && {LOADED}")
    compare = f"document.querySelector('a[href=\"#compare/{family.parent}/{family.child}\"]')"
    await page.click(compare)
    await page.until(f"{LOADED} && document.querySelector('.sides .first')")
    said = await page.evaluate("document.querySelector('main').innerText")
    assert "the same until t=3" in said and "another action at t=5" in said
    assert await page.evaluate(PLACES) == ["4", "5 first difference", "6"]
    first = "[...document.querySelectorAll('.sides tr.first td a')].map((each) => [each.innerText, each.hash])"
    assert await page.evaluate(first) == [["ls", f"#{family.parent}/5"], ["other", f"#{family.child}/2"]]
    heads = await page.evaluate("document.querySelector('.sides thead').innerText")
    assert "reward 0.9" in heads and "reward 0.6" in heads and heads.count("command_not_found 1") == 2
    await page.evaluate("history.back()")
    await page.until(f"{MEMBERS}.length === 4")


@pytest.mark.parametrize(
    ("one", "other", "shared", "places"),
    [
        ("child", "sibling", 2, ["3", "4 first difference", "5", "6"]),
        ("grandchild", "parent", 3, ["4", "5 first difference", "6"]),
        ("grandchild", "sibling", 2, ["3", "4 first difference", "5"]),
    ],
)
async def test_relatives_are_aligned(
    family: Family, page: Page, one: str, other: str, shared: int, places: list[str]
) -> None:
    await page.open(f"{family.url}/viewer/#compare/{getattr(family, one)}/{getattr(family, other)}")
    await page.until(f"{LOADED} && document.querySelector('.sides .first')")
    assert f"the same until t={shared}" in await page.evaluate("document.querySelector('main').innerText")
    assert await page.evaluate(PLACES) == places


async def test_a_fork_of_a_deleted_episode_says_so(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        parent = env.eid
        forks = [await env.fork(0), await env.fork(0)]
        for number, fork in enumerate(forks):
            await play(fork, "same", f"other {number}")
        one, other = (fork.eid for fork in forks)
        for fork in forks:
            await fork.close()
    assert httpx.delete(f"{server.url}/episodes/{parent}").json()["deleted"] == 1
    await page.open(f"{server.url}/viewer/#forks/{one}")
    await page.until(f"{MEMBERS}.length === 1 && {LOADED}")
    assert "is not here" in await page.evaluate("document.querySelector('main').innerText")
    await page.evaluate(f"location.hash = 'compare/{one}/{other}'")
    await page.until(f"{LOADED} && document.querySelector('.sides .first')")
    assert await page.evaluate(PLACES) == ["1", "2 first difference"]


async def test_many_forks_come_a_page_at_a_time(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        forks = [await env.fork(0) for _ in range(25)]
        for fork in forks:
            await fork.close()
    await page.open(f"{server.url}/viewer/#forks/{env.eid}")
    await page.until(f"{MEMBERS}.length === 21 && {LOADED}")
    await page.click(BUTTON % "more forks")
    await page.until(f"{MEMBERS}.length === 26 && {LOADED} && !({BUTTON % 'more forks'})")


async def test_a_long_line_of_forks_is_bounded_and_goes_up(server: LocalServer, page: Page) -> None:
    async with ErrataClient(server.url) as env:
        await env.reset()
        line = [env]
        for _ in range(18):
            line.append(await line[-1].fork(0))
        for fork in line[1:]:
            await fork.close()
        await page.open(f"{server.url}/viewer/#forks/{line[-1].eid}")
        await page.until(f"{LOADED} && {MEMBERS}.length === 17")
        await page.click(BUTTON % "more ancestors")
        await page.until(f"{LOADED} && {MEMBERS}.length === 19 && {MEMBERS}[0] === '{line[0].eid}'")
        await page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
        assert await page.evaluate("document.documentElement.scrollWidth") == 360


@pytest.fixture
async def played(server: LocalServer) -> str:
    """Return an episode of three steps, the last of which fails; it is a rollout of a group of its own."""
    async with ErrataClient(server.url, labels=Labels(run="r", step=1, group=str(uuid.uuid4()))) as env:
        await env.reset()
        await play(env, "a", "b", "fail it!")
        return str(env.eid)


async def look(page: Page, url: str, eid: str, t: int) -> None:
    """Open the page of a turn, and wait until it is shown and its digest is checked."""
    await page.open(f"{url}/viewer/#{eid}/{t}")
    await shown(page, t)


async def end_fork(page: Page, says: str) -> None:
    """Press the button that ends the fork, and the one that it asks with; wait for what the page says then."""
    await page.click(BUTTON % "end this fork")
    await page.click(BUTTON % "end it")
    await page.until(f"document.querySelector('.made').innerText.includes('{says}')")


async def fork_here(page: Page) -> tuple[str, str, str, str]:
    """Press the button, and the one that it asks with; return the eid of the fork and the commands."""
    await page.click(BUTTON % "fork here")
    await page.click(BUTTON % "make the fork")
    eid = await page.until("document.querySelector('.made .eid')?.innerText")
    commands = [await page.evaluate(COMMAND % name) for name in ("Python", "shell", "curl")]
    return (eid, *commands)


def run(*command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, env={**os.environ, "PATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_fork_is_made_at_a_turn_and_its_commands_play_it(server: LocalServer, played: str, page: Page) -> None:
    await look(page, server.url, played, 2)
    eid, python, shell, curl = await fork_here(page)
    assert "no such thing: it!" in run(sys.executable, "-c", python)
    async with Episodes(server.url) as episodes:
        turns = (await episodes.turns(eid)).turns
        assert [turn.action for turn in turns][1:] == [{"command": "fail it!"}]
        assert "no such thing: it!" in run("bash", "-c", shell)
        assert (await episodes.turns(eid)).deliveries == 3
        (listed,) = (await episodes.episodes(wanted=EpisodeFilter(origin=played, text=eid))).episodes
        assert listed.origin is not None and (listed.origin.eid, listed.origin.t) == (played, 2)
    assert json.loads(run("bash", "-c", curl))["eid"] == eid
    await page.click("document.querySelector('.made .eid')")
    await page.until(f"location.hash === '#{eid}' && document.querySelector('.row')?.ariaSetSize === '3'")


async def test_a_fork_counts_in_no_sum_of_its_parents_group(server: LocalServer, played: str, page: Page) -> None:
    await look(page, server.url, played, 2)
    await page.click(BUTTON % "fork here")
    assert "It has no labels" in await page.evaluate("document.querySelector('.fork p').innerText")
    await page.click(BUTTON % "cancel")
    eid, _, _, curl = await fork_here(page)
    assert json.loads(run("bash", "-c", curl))["eid"] == eid
    async with Episodes(server.url) as episodes:
        group = (await episodes.episode(played)).group
        assert group is not None
        listed = (await episodes.episodes(wanted=EpisodeFilter(group=group))).episodes
        assert [one.eid for one in listed] == [played]
        fork = await episodes.episode(eid)
        assert (fork.group, fork.step, fork.run) == (None, None, None)


async def test_a_fork_is_ended_where_it_was_made_once_it_is_asked_for_twice(
    server: LocalServer, played: str, page: Page
) -> None:
    await look(page, server.url, played, 2)
    eid, _, shell, _ = await fork_here(page)
    assert "no such thing: it!" in run("bash", "-c", shell)
    await page.click(BUTTON % "end this fork")
    await page.click(BUTTON % "cancel")
    async with Episodes(server.url) as episodes:
        assert (await episodes.episode(eid)).status != "closed"
        await end_fork(page, "the fork has ended")
        assert (await episodes.episode(eid)).status == "closed"
        assert (await episodes.turns(eid)).deliveries == 2


async def test_a_fork_that_somebody_plays_ends_with_their_connection(
    server: LocalServer, played: str, page: Page
) -> None:
    await look(page, server.url, played, 2)
    eid, _, _, curl = await fork_here(page)
    session_id = json.loads(run("bash", "-c", curl))["session_id"]
    async with Episodes(server.url) as episodes, ErrataClient(server.url, session_id=session_id) as env:
        await env.state()
        await end_fork(page, "it ends with that connection")
        assert (await episodes.episode(eid)).status == "open"
    await page.click("document.querySelector('.made .eid')")
    status = "[...document.querySelectorAll('header dt')].find((each) => each.innerText === 'status')"
    await page.until(f"location.hash === '#{eid}' && {status}?.nextSibling.innerText === 'closed'")


async def test_an_end_that_is_refused_says_why(server: LocalServer, played: str, page: Page) -> None:
    await look(page, server.url, played, 2)
    await fork_here(page)
    await page.evaluate(
        "void (globalThis.fetch = ((ask) => (url, how) => ask(url, how?.body"
        ' ? {...how, body: how.body.replace(/session_id":"[^"]*/, \'session_id":"none\')} : how))(fetch))'
    )
    await page.click(BUTTON % "end this fork")
    await page.click(BUTTON % "end it")
    await page.until("document.querySelector('.made [role=alert]')?.innerText")
    assert await page.evaluate(f"{BUTTON % 'end this fork'} !== undefined")


async def test_nothing_is_forked_before_it_is_asked_for_twice(server: LocalServer, played: str, page: Page) -> None:
    await look(page, server.url, played, 2)
    await page.click(BUTTON % "fork here")
    assert "goes on from t=2" in await page.until("document.querySelector('.fork p')?.innerText")
    await page.click(BUTTON % "cancel")
    await page.click(BUTTON % "fork here")
    await press(page, "k")  # another turn asks anew
    await page.until(f"location.hash.endsWith('/1') && {BUTTON % 'fork here'} && !document.querySelector('.fork p')")
    async with Episodes(server.url) as episodes:
        assert (await episodes.episodes(wanted=EpisodeFilter(origin=played))).episodes == []


async def test_an_episode_names_its_forks_and_a_fork_what_it_began_with(family: Family, page: Page) -> None:
    await page.open(f"{family.url}/viewer/#{family.parent}")
    at = "[...document.querySelectorAll('header dd')].find((each) => each.innerText.includes(', at t='))"
    assert await page.until(f"{at}?.innerText") == "2, at t=2, t=3"
    assert await page.evaluate(f"[...{at}.querySelectorAll('a')].map((each) => each.hash)") == [
        f"#forks/{family.parent}", f"#{family.parent}/2", f"#{family.parent}/3",
    ]  # fmt: skip
    await page.until("document.querySelector('.digest.same')")
    await page.quiet()
    await page.open("about:blank")
    await look(page, family.url, family.grandchild, 0)
    for part in (".row .what", ".turn .fields, .turn .output"):
        said = await page.evaluate(f"document.querySelector('{part}').innerText")
        assert f"of {family.child} at t=1" in said, part
    async with Episodes(family.url) as episodes:
        sid = (await episodes.episode(family.grandchild)).session
    assert sid not in await page.evaluate("document.body.textContent")


async def test_a_fork_of_the_last_turn_shows_its_state(server: LocalServer, played: str, page: Page) -> None:
    await look(page, server.url, played, 3)
    _, python, shell, _ = await fork_here(page)
    assert "step_count" in run(sys.executable, "-c", python) and "step_count" in run("bash", "-c", shell)
    await page.click(BUTTON % "close")
    await page.until("!document.querySelector('.made')")


async def test_a_fork_of_a_server_with_tokens_is_played_with_the_token(
    tmp_path: Path, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalServer(SHELL, tmp_path, Settings(token=SecretStr("first,second"))) as server:
        async with ErrataClient(server.url, headers={"Authorization": "Bearer second"}) as env:
            await env.reset()
            await env.step({"command": "ls"})
            await page.open(f"{server.url}/viewer/#{env.eid}/0")
            await log_in(page, "second")
            await page.until("document.querySelector('.digest.same') && document.querySelector('.stream.live')")
            eid, python, shell, curl = await fork_here(page)
            assert "second" not in python + shell + curl
            monkeypatch.setenv("ERRATA_TOKEN", "second")
            assert "ran ls" in run(sys.executable, "-c", python) and "ran ls" in run("bash", "-c", shell)
            assert json.loads(run("bash", "-c", curl))["eid"] == eid
            assert await page.evaluate(f"{BUTTON % 'end this fork'} === undefined")
            end = await page.evaluate(COMMAND % "end")
            assert "second" not in end and "error" not in json.loads(run("bash", "-c", end))
            ended = httpx.get(f"{server.url}/episodes/{eid}", headers={"Authorization": "Bearer second"}).json()
            assert ended["status"] == "closed"


async def test_forks_of_several_environments_are_played_at_their_own_address(tmp_path: Path, page: Page) -> None:
    with LocalServer([COUNT, SHELL], tmp_path) as server:
        async with ErrataClient(f"{server.url}/ShellEnvironment") as env:
            await env.reset()
            await env.step({"command": "'$(id)\x1b\u202e🎉"})
            eid = env.eid
        await look(page, server.url, eid, 0)
        child, python, shell, _ = await fork_here(page)
        assert (python + shell).isascii() and "\x1b" not in python + shell
        for output in (run(sys.executable, "-c", python), run("bash", "-c", shell)):
            assert "ran '$(id)" in output
        async with Episodes(server.url) as episodes:
            turns = (await episodes.turns(child)).turns
        assert [turn.action for turn in turns[1:]] == [{"command": "'$(id)\x1b\u202e🎉"}] * 2


async def test_a_value_of_json_is_the_same_in_python(family: Family, page: Page) -> None:
    value = {"a": [1, -2.5, None, True, False, "é🎉\"'\\\n\x00\x7f\u2028"], "$(b)": {}, "": []}
    await page.open(f"{family.url}/viewer/")
    made = await page.evaluate(f"import('./fork_here.js').then((it) => it.literal({json.dumps(value)}))")
    assert ast.literal_eval(made) == value and made.isascii() and made.isprintable()


async def test_what_is_read_only_has_no_button(family: Family, data_dir: Path, page: Page) -> None:
    app = journal_app({data_dir: runtime_for_reading(data_dir)}, Settings(), changes=Changes())
    with serving(app) as url:
        await look(page, url, family.parent, 3)
        await page.quiet()
        assert await page.evaluate(f"{BUTTON % 'fork here'} === undefined")
        await page.evaluate(f"location.hash = 'forks/{family.parent}'")
        await page.until(f"{MEMBERS}.length >= 4 && {LOADED}")
        await page.quiet()


async def test_a_refused_fork_says_why(family: Family, page: Page) -> None:
    await look(page, family.url, family.parent, 3)
    other_body = "((ask) => (url, how) => ask(url, how?.body ? {...how, body: '{}'} : how))(fetch)"
    await page.evaluate(f"void (globalThis.fetch = {other_body})")
    await page.click(BUTTON % "fork here")
    await page.click(BUTTON % "make the fork")
    await page.until("document.querySelector('.fork [role=alert]')?.innerText.includes('a fork request is')")
    assert page.troubles and all("422" in trouble for trouble in page.troubles)
    page.troubles.clear()
