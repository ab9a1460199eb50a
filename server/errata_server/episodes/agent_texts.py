"""`AgentTexts`: what agents read of payloads, by the environments that are served or installed here (PROTOCOL B4)."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from errata_protocol.bounded_json import decode
from errata_protocol.environment import EnvironmentSpec, default_agent_text
from errata_protocol.replay import AgentText, Kind, observation_of

from ..environments.discovery import published

log = logging.getLogger("errata.server")


class AgentTexts:
    """Makes the text that an agent read of a payload.

    Args:
        served: Environments that are served here, by name; they come before installed ones.
    """

    def __init__(self, served: Mapping[str, EnvironmentSpec] | None = None) -> None:
        self._served = served if served is not None else {}
        self._installed: dict[str, EnvironmentSpec | None] = {}

    def read(self, environment: str, version: str | None, t: int, kind: Kind, payload: bytes) -> AgentText:
        """Return what the agent read of a delivery. It may take as long as the environment's function does.

        Args:
            environment: Name of the environment that was played.
            version: ``agent_text_version`` of the episode.
            t: The delivery.
            kind: Kind of its request; of a call of a tool the agent read the payload itself.
            payload: P_t.
        """
        if kind == "mcp":
            return AgentText(t=t, kind=kind, agent_text=payload.decode())
        try:
            value = decode(payload)
            observation = observation_of(value)
        except (ValueError, TypeError, AttributeError):  # no object, or none in it: an environment of others
            return AgentText(t=t, kind=kind, agent_text=payload.decode(), as_read=False)
        if version is None:
            return AgentText(t=t, kind=kind, agent_text=default_agent_text(observation))
        spec = self._spec(environment)
        if spec is not None and spec.agent_text_version == version:
            try:
                text = spec.agent_text(observation)
            except Exception as error:  # it is the environment's code, and the observation may be another one's
                log.warning("agent_text of %s cannot read t=%d of an episode: %r", environment, t, error)
            else:
                return AgentText(t=t, kind=kind, agent_text=text, agent_text_version=version)
        return AgentText(t=t, kind=kind, agent_text=default_agent_text(observation), as_read=False)

    def _spec(self, environment: str) -> EnvironmentSpec | None:
        if environment in self._served:
            return self._served[environment]
        if environment not in self._installed:
            point, loaded = published().get(environment), None
            try:
                loaded = point.load() if point is not None else None
            except Exception as error:  # it is the package's code that runs
                log.warning("the environment %s that is installed here cannot be loaded: %r", environment, error)
            self._installed[environment] = loaded
        return self._installed[environment]
