"""The pictures in the documents show this viewer and agents in real sandboxes; `make pictures` takes them anew."""

from __future__ import annotations

import base64
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from errata_protocol.labels import Labels
from errata_server.settings import Settings
from terminal_env import TerminalAction, TerminalEnv
from terminal_env.demo.script import EPISODES, SUBMIT, run

from ..server.local_server import LocalServer
from .visits import IN_CHROMIUM, visit

pytestmark = [*IN_CHROMIUM, pytest.mark.sandbox]

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
TO = os.environ.get("ERRATA_PICTURES")
"""Directory that the pictures are written to; nowhere if it is not set."""

WIDTH, HEIGHT = 1280, 800
RUN = "grpo-qwen-4b"

INTERVALS = next(episode for episode in EPISODES if episode.task_id == "python-intervals").actions
MERGE = next(episode for episode in EPISODES if episode.task_id == "git-merge-conflict")
REPORT = next(episode for episode in EPISODES if episode.task_id == "access-report").actions
TESTS = run("cd intervals && python3 -m pytest -q")
READ = run("cat intervals.py")

GROUP: tuple[tuple[TerminalAction, ...], ...] = (
    (TESTS, READ, *INTERVALS[5:]),
    (TESTS, run("sed -i 's/start > merged/start >= merged/' intervals.py"), run("python3 -m pytest -q"), SUBMIT),
    (run("cd interval && ls"), TESTS, run("sed -n 1,20 intervals.py"), READ, SUBMIT),
    (TESTS, run("python3 -c 'import intervals; print(intervals.merge(None))'"), SUBMIT),
)
"""What four rollouts of one task do."""


class Story:
    """What the pictures show.

    Attributes:
        url: Address of the server.
        best: eid of the rollout of `GROUP` that passes its tests.
        parent: eid of the episode that was forked.
        fork: eid of the episode that was made by that fork.
    """

    url: str
    best: str
    parent: str
    fork: str


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    made = Story()
    with LocalServer("terminal", tmp_path_factory.mktemp("data"), Settings(sandbox="namespace")) as server:
        made.url = server.url
        for number, actions in enumerate(GROUP):
            labels = Labels(run=RUN, step=12, group="python-intervals-3")
            eid = play(made.url, "python-intervals", actions, labels)
            if number == 0:
                made.best = eid
        play(made.url, "access-report", REPORT, Labels(run=RUN, step=12, group="access-report-1"))
        with TerminalEnv(base_url=made.url, labels=Labels(run=RUN, step=13)).sync() as env:
            env.reset(task_id=MERGE.task_id)
            for action in MERGE.actions:
                env.step(action)
            made.parent = str(env.eid)
            assert MERGE.fork_at is not None
            with env.fork(MERGE.fork_at) as fork:
                for action in MERGE.better:
                    fork.step(action)
                made.fork = str(fork.eid)
        yield made


def play(url: str, task: str, actions: tuple[TerminalAction, ...], labels: Labels) -> str:
    with TerminalEnv(base_url=url, labels=labels).sync() as env:
        env.reset(task_id=task)
        for action in actions:
            env.step(action)
        return str(env.eid)


SCREENS = {
    "episodes": ("", "document.querySelectorAll('tbody tr').length === 7 && document.querySelector('.sums')"),
    "episode": ("#{best}/1", "document.querySelector('.digest.same')"),
    "compare": ("#compare/{parent}/{fork}", "document.querySelector('.sides tr.first')"),
    "group": ("#group?group=python-intervals-3", "document.querySelectorAll('canvas').length === 4"),
}
"""Addresses of the screens below the viewer's, and what has to be there before each is taken."""


@pytest.mark.parametrize("name", SCREENS)
async def test_a_screen_looks_like_its_picture(story: Story, name: str) -> None:
    hash_, ready = SCREENS[name]
    async with visit("about:blank") as page:
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
        )
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
        await page.open(f"{story.url}/viewer/{hash_.format(**vars(story))}")
        await page.until(ready)
        await page.quiet()
        taken = base64.b64decode((await page.call("Page.captureScreenshot", format="png"))["data"])
    if TO:
        Path(TO).mkdir(exist_ok=True)
        (Path(TO) / f"{name}.png").write_bytes(taken)
    kept = (PICTURES / f"{name}.png").read_bytes()
    assert size(kept) == size(taken) == (WIDTH, HEIGHT)
    # Ids, times and fonts differ; a screen that is empty, or quite another one, has another amount of detail.
    assert 0.5 < len(taken) / len(kept) < 2


def size(png: bytes) -> tuple[int, int]:
    """Return the width and height of a picture, in pixels."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    return struct.unpack(">II", png[16:24])  # type: ignore[return-value]
