"""An Errata environment whose steps fail as they are told to."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

from errata_protocol.markers import Detection, ErrorKind, ErrorMarkers, ErrorSite


class FailAction(Action):
    """Fail with ``kind``, of which the first word of ``command`` is the place; empty: do not."""

    command: str = ""
    kind: str = ""
    unsure: bool = False


class FailObservation(ErrorMarkers, Observation):
    """What a command printed."""

    output: str = ""


class FailEnvironment(Environment[FailAction, FailObservation, State]):
    """Fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> FailObservation:
        return FailObservation()

    def step(self, action: FailAction, timeout_s: float | None = None, **_: Any) -> FailObservation:
        observation = FailObservation(output=f"{action.command}: no", reward=0.0)
        if not action.kind:
            return observation
        end = len(action.command.partition(" ")[0])
        sites = [
            ErrorSite(action_field="command", action_span=(0, end), source="message", message=observation.output),
            ErrorSite(file="src/a.py", line=3, column=9, test_id="a::b", source="traceback"),
        ]
        severity = "warning" if action.unsure else None
        return observation.with_detection(Detection.of(ErrorKind(action.kind), *sites, severity=severity))

    @property
    def state(self) -> State:
        return State(episode_id=None, step_count=0)
