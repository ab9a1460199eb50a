"""A shelf of files of which one holds a word: for trainers. It marks failed looks, forks, and breaks on demand."""

import asyncio
import json

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.environment import EnvironmentSpec, Snapshot
from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite


class ShelfAction(Action):
    tool: str
    path: str = ""
    word: str = ""


class ShelfObservation(ErrorMarkers, Observation):
    text: str = ""


TOGETHER = 8
"""Sessions that have to look at `together` at the same time, or all of them wait for ever."""


class FragileShelf(Environment[ShelfAction, ShelfObservation, State]):
    """A shelf without snapshots: a session does not survive its server."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    waiting: "list[asyncio.Future[None]]" = []  # noqa: RUF012 # of all sessions

    def __init__(self):
        super().__init__()
        self._state = State(episode_id=None, step_count=0)
        self._place = self._word = ""

    def reset(self, seed=None, episode_id=None, **kwargs):
        raise NotImplementedError("use reset_async")

    def step(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError("use step_async")

    async def reset_async(self, seed=None, episode_id=None, place="red", word="owl", slow_s=0.0, **kwargs):
        await asyncio.sleep(slow_s)
        self._state = State(episode_id=episode_id or "shelf", step_count=0)
        self._place, self._word = place, word
        return ShelfObservation(text=f"One of red, green, blue holds a word. Submit it. Not in {place[::-1]}.")

    async def step_async(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.path == "slow":
            await asyncio.sleep(0.2)
        if action.path == "together":
            mine = asyncio.get_running_loop().create_future()
            self.waiting.append(mine)
            if len(self.waiting) == TOGETHER:
                for waiting in self.waiting:
                    waiting.set_result(None)
                self.waiting.clear()
            await mine
        if action.path == "broken":
            raise RuntimeError("the shelf fell")
        if action.tool == "read" and action.path == self._place:
            return ShelfObservation(text=f"the word is {self._word}")
        if action.tool == "read":
            site = ErrorSite(action_field="path", action_span=(0, len(action.path)), file=action.path)
            return ShelfObservation(text=f"no file {action.path}").with_detection(
                Detection(ErrorKind.PATH_NOT_FOUND, error_site=site, hint_template_key="fs.missing")
            )
        if action.tool == "submit":
            right = action.word == self._word
            return ShelfObservation(text="right" if right else "wrong", reward=float(right), done=True)
        raise ValueError(f"no tool {action.tool}")

    @property
    def state(self):
        return self._state


class ShelfEnvironment(FragileShelf):
    async def snapshot(self):
        return Snapshot(json.dumps([self._place, self._word, self._state.step_count]).encode())

    async def restore(self, snapshot):
        self._place, self._word, count = json.loads(snapshot.state)
        self._state = State(episode_id="shelf", step_count=count)


def text(observation):
    return observation["text"] if isinstance(observation, dict) else observation.text


def tool(name, description, required=True, **properties):
    needed = list(properties) if required else []
    return {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, "required": needed},
    }


SPEC = EnvironmentSpec(
    name="shelf",
    factory="tests.environments.shelf:ShelfEnvironment",
    action_cls=ShelfAction,
    observation_cls=ShelfObservation,
    agent_text=text,
    tools=(
        tool("read", "Read a file.", path={"type": "string", "description": "Which."}),
        tool("submit", "Say the word.", required=False, word={"type": "string", "description": "The word."}),
    ),
    closing_tool="submit",
)
