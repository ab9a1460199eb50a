"""A person compares the rollouts of one prompt and training step: which did best, and where others went another way."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from errata_client import EnvPool, ErrataClient
from errata_protocol.labels import Labels

from ..browser.chromium import Page
from ..server.local_server import LocalServer
from .test_episode import SHELL
from .visits import IN_CHROMIUM

pytestmark = IN_CHROMIUM

LABELS = Labels(run="grpo <3>", step=7, group="prompt/1?&")
ROLLOUTS = {
    "best": ("ls", "cat a", "done"),
    "same": ("ls", "cat a"),
    "other": ("ls", "fail it!", "cat a", "done"),
    "longer": ("ls", "cat a", "done not", "ls"),
    "worst": ("fail one!", "fail two!"),
}
ROWS = "[...document.querySelectorAll('tbody tr')]"
READ = "document.querySelector('main [role=status]')?.innerText.startsWith('%d')"
READS = (
    "performance.getEntriesByType('resource').map((each) => each.name).filter((name) => /[/]episodes[?/]/.test(name))"
)


class Group:
    """The server, and the eids of `ROLLOUTS` by name."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.eids: dict[str, str] = {}

    @property
    def order(self) -> list[str]:
        """Return the eids from the highest reward to the lowest."""
        return [self.eids[name] for name in ("best", "other", "longer", "same", "worst")]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with LocalServer(SHELL, tmp_path_factory.mktemp("data")) as server:
        made = Group(server.url)
        with ErrataClient(server.url, labels=LABELS).sync() as env:
            for name, commands in ROLLOUTS.items():
                env.reset(task="add", seed=len(made.eids))
                for command in commands:
                    env.step({"command": command})
                made.eids[name] = str(env.eid)
            env.labels = Labels(run="grpo <3>", step=8, group="prompt/1?&")
            env.reset(task="add")
        with ErrataClient(server.url).sync() as env:
            env.reset(task="none")
        yield made


async def cells(page: Page) -> dict[str, list[str]]:
    """Return the texts of the rows by eid."""
    rows = await page.evaluate(f"{ROWS}.map((row) => [...row.cells].map((cell) => cell.innerText))")
    return {row[1]: row for row in rows}


async def test_the_list_leads_to_the_rollouts_of_one_prompt_and_step_by_reward(group: Group, page: Page) -> None:
    await page.open(f"{group.url}/viewer/")
    await page.until(f"{ROWS}.length === 7")
    assert await page.evaluate(f"{ROWS}.filter((row) => row.innerText.includes('prompt/1?&')).length") == 6
    await page.click(f"{ROWS}.find((row) => row.innerText.includes('{group.eids['same']}')).querySelectorAll('a')[1]")
    await page.until(f"{ROWS}.length === 5 && {READ % 5}")
    assert await page.evaluate("location.hash") == "#group?run=grpo+%3C3%3E&step=7&group=prompt%2F1%3F%26"
    rows = await cells(page)
    assert list(rows) == group.order
    title = await page.evaluate("document.querySelector('h1').innerText")
    assert "grpo <3>" in title and "7" in title and "prompt/1?&" in title
    assert "mean reward 0.3," in await page.evaluate("document.querySelector('main [role=status]').innerText")
    best, other, worst = (rows[group.eids[name]] for name in ("best", "other", "worst"))
    assert best[0] == "1.2" and best[2] == "4" and best[3] == "done" and best[4] == "none" and best[6] == "the best"
    assert other[4] == "t=2 command_not_found" and other[5] == "command_not_found 1"
    assert worst[0] == "-1" and worst[4] == "t=1 command_not_found" and worst[5] == "command_not_found 2"


async def test_where_each_leaves_the_best_is_named_and_leads_there(group: Group, page: Page) -> None:
    await page.open(f"{group.url}/viewer/#{group.eids['other']}")
    await page.click("[...document.querySelectorAll('header a')].find((each) => each.innerText === 'prompt/1?&')")
    await page.until(f"{ROWS}.length === 5 && {READ % 5}")
    rows = await cells(page)
    leaves = {name: rows[eid][6] for name, eid in group.eids.items()}
    assert leaves["other"].startswith("t=2 fail it! instead of cat a")
    assert leaves["same"].startswith("t=3: it ends, the best goes on")
    assert leaves["longer"].startswith("t=3 done not instead of done")
    assert leaves["worst"].startswith("t=1 fail one! instead of ls")
    names = await page.evaluate("[...document.querySelectorAll('canvas')].map((each) => each.ariaLabel)")
    assert f"{group.eids['other']}: 5 turns, 1 with an error" in names

    row = f"{ROWS}.find((row) => row.cells[1].innerText === '{group.eids['other']}')"
    await page.click(f"{row}.querySelector('.leaves a')")
    await page.until(f"location.hash === '#{group.eids['other']}/2' && document.querySelector('mark')")
    await page.evaluate("history.back()")
    await page.until(f"{ROWS}.length === 5 && {READ % 5}")
    await page.click(f"{row}.querySelector('.leaves a:last-child')")
    await page.until("document.querySelector('.sides tr.first')?.innerText.startsWith('2')")
    assert "aligned by t" in await page.evaluate("document.querySelector('main').innerText")
    await page.evaluate("history.back()")
    await page.until(f"{ROWS}.length === 5 && {READ % 5}")
    await page.click(f"{row}.cells[4].querySelector('a')")
    await page.until(f"location.hash === '#{group.eids['other']}/2'")


async def test_a_deep_link_to_a_group_that_is_not_there_is_empty(group: Group, page: Page) -> None:
    await page.open(f"{group.url}/viewer/#group?run=none")
    await page.until(f"{READ % 0}")
    await page.evaluate("location.hash = 'group?'")
    await page.until("document.querySelector('main')?.innerText.includes('names no label')")
    await page.evaluate("location.hash = 'group?run=grpo+%3C3%3E'")
    await page.until(f"{ROWS}.length === 6")  # of all steps


async def test_a_group_fits_a_narrow_window(group: Group, page: Page) -> None:
    await page.open(f"{group.url}/viewer/#group?step=7")
    await page.call("Emulation.setDeviceMetricsOverride", width=360, height=740, deviceScaleFactor=1, mobile=True)
    await page.until(f"{ROWS}.length === 5 && {READ % 5}")
    assert await page.evaluate("document.documentElement.scrollWidth") == 360


async def test_a_fork_is_compared_by_its_whole_history(group: Group, page: Page) -> None:
    async with ErrataClient(group.url, labels=Labels(group="forks")) as env:
        await env.reset()
        for command in ("a", "b", "done"):
            await env.step({"command": command})
        child = await env.fork(2)
        await child.step({"command": "c"})
        await child.close()
    await page.open(f"{group.url}/viewer/#group?group=forks")
    await page.until(f"{ROWS}.length === 2 && {READ % 1}")
    rows = await cells(page)
    assert rows[str(child.eid)][6] == f"a fork of {env.eid} at t=2 compare" and rows[str(env.eid)][6] == "the best"
    said = await page.evaluate("document.querySelector('[role=status].none').innerText")
    assert said.startswith("1 rollouts, mean reward") and said.endswith("; 1 fork beside them")
    await page.click("document.querySelector('.leaves a:last-child')")
    await page.until("document.querySelector('.sides tr.first')?.innerText.startsWith('3')")


async def test_64_rollouts_of_100_turns_take_a_request_each_and_no_state(group: Group, page: Page) -> None:
    count = 66
    async with EnvPool(group.url, count, labels=Labels(group="many")) as pool:
        await pool.reset_batch([{} for _ in range(count)])
        for t in range(100):
            await pool.step_batch([{"command": "fail" if t == number else "ls"} for number in range(count)])
    await page.open(f"{group.url}/viewer/#group?group=many")
    await page.until(f"document.querySelectorAll('canvas').length === 64 && {READ % 64}")
    reads = await page.evaluate(READS)
    assert len(reads) == 65 and not [read for read in reads if "/states/" in read]
    await page.click("[...document.querySelectorAll('button')].find((each) => each.innerText === 'more')")
    await page.until(f"document.querySelectorAll('canvas').length === 66 && {READ % 66}")
    assert len(await page.evaluate(READS)) == 68
    leaves = [row[6] for row in (await cells(page)).values()]
    assert leaves.count("the best") == 1 and all(text.startswith(("t=", "the best")) for text in leaves)
