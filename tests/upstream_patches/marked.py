"""Serves an environment with markers on a patched OpenEnv that records episodes; prints its URL. Nothing of ours."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import threading
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, ErrorMarkers, ErrorSite, Observation, State, create_app


class TallyAction(Action):
    """Add ``n``; ``do`` names what goes wrong."""

    n: int = 1
    do: str = ""


class TallyObservation(ErrorMarkers, Observation):
    """The sum so far."""

    total: float = 0


class TallyEnvironment(Environment[TallyAction, TallyObservation, State]):
    """Adds numbers."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._total = 0.0
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> TallyObservation:
        self._total = 0.0
        self._state = State(episode_id=episode_id, step_count=0)
        return TallyObservation()

    def step(self, action: TallyAction, timeout_s: float | None = None, **kwargs: Any) -> TallyObservation:
        raise NotImplementedError

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        return self.reset(seed, episode_id)

    async def step_async(self, action: TallyAction, timeout_s: float | None = None, **kwargs: Any) -> Any:
        if action.do == "fail":
            raise ValueError("the tally is broken")
        if action.do == "sleep":
            await asyncio.sleep(0.4)
        self._total += action.n
        self._state.step_count += 1
        observation = TallyObservation(total=self._total, reward=float(action.n))
        if not action.do.startswith("mark"):
            return observation
        sites = [
            ErrorSite(t=self._state.step_count, action_field="do", action_span=word.span(), message=f"{word[0]}: no")
            for word in re.finditer(r"\S+", action.do)
        ]
        return observation.marked("command_not_found", *sites, key="cmd.missing")

    @property
    def state(self) -> State:
        return self._state


def main() -> None:
    """Serve until standard input ends."""
    app = create_app(
        TallyEnvironment, TallyAction, TallyObservation, env_name="tally", max_concurrent_envs=16, record_episodes=True
    )
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True).start()
    print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
