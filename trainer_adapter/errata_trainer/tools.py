"""What a trainer needs to know of an environment: the tools that a student may call, how observations become text, and
the tool that closes an episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from errata_protocol.environment import EnvironmentSpec, default_agent_text
from errata_protocol.errors import InvalidRequest

GROUP = "errata.environments"
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: its description for the student, and the environment's action for a call of it.

    Attributes:
        name: What the student calls.
        description: What it does, one sentence or a few.
        parameters: JSON schema of its arguments, an object.
        constants: Fields of the action that say which tool it is, beside the arguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)

    def action(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the environment's action for a call with these arguments.

        Raises:
            TypeError: The arguments do not fit; the text is written for the student who wrote the call.
        """
        properties, required = self.parameters.get("properties", {}), self.parameters.get("required", [])
        takes = f"it takes {', '.join(properties) or 'no argument'}"
        for name in arguments:
            if name not in properties:
                raise TypeError(f"{self.name}() has no argument {name!r}: {takes}")
        for name in required:
            if name not in arguments:
                raise TypeError(f"{self.name}() needs the argument {name!r}: {takes}")
        # Students write null for what they do not want to say.
        given = {name: value for name, value in arguments.items() if value is not None or name in required}
        for name, value in given.items():
            wanted = properties[name].get("type")
            kinds = _TYPES.get(wanted) if isinstance(wanted, str) else None
            if kinds is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
                raise TypeError(f"{self.name}(): {name} has to be of type {wanted}, got {value!r}")
        return {**self.constants, **given}


@dataclass(frozen=True, slots=True)
class PlayedEnvironment:
    """What a trainer needs of an environment: its tools and how to show its observations.

    Attributes:
        name: As the server calls it.
        tools: What the student may call, by name.
        agent_text: From a decoded observation to what the student reads.
        closing_tool: Called without arguments for a student that stopped before its episode was over; None calls none.
        agent_text_version: Version of ``agent_text``, which the server writes into each episode; None if unknown.
    """

    name: str
    tools: dict[str, Tool]
    agent_text: Callable[[Any], str] = default_agent_text
    closing_tool: str | None = None
    agent_text_version: str | None = None


def published(name: str) -> PlayedEnvironment:
    """Return an installed environment by name, from the entry point of its package.

    Raises:
        InvalidRequest: No installed package publishes it, or it publishes no tools.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise InvalidRequest(
            f"no installed package publishes an environment {name!r} (there are: {known}): install its package, or "
            "describe it with a PlayedEnvironment"
        )
    spec: EnvironmentSpec = points[name].load()
    return of_spec(spec)


def of_spec(spec: EnvironmentSpec) -> PlayedEnvironment:
    """Return the `PlayedEnvironment` of an `EnvironmentSpec`.

    A spec without tools becomes one tool, ``step``, whose arguments are the action's fields.
    """
    if spec.tools:
        # A class with a field for it has one action for all tools; without one there is one tool.
        named = "tool" in getattr(spec.action_cls, "model_fields", {})
        tools = [
            Tool(tool["name"], tool["description"], tool["parameters"], {"tool": tool["name"]} if named else {})
            for tool in spec.tools
        ]
    else:
        tools = [step_tool(spec.action_cls.model_json_schema())]
    return PlayedEnvironment(
        spec.name,
        {t.name: t for t in tools},
        spec.agent_text,
        spec.closing_tool,
        spec.agent_text_version,
    )


def step_tool(action_schema: Mapping[str, Any]) -> Tool:
    """Return the single tool ``step`` for an environment that publishes none: its parameters are the fields of the
    action.

    Args:
        action_schema: JSON schema of the action, as ``/schema`` has it.
    """
    properties = {name: field for name, field in action_schema.get("properties", {}).items() if name != "metadata"}
    required = [name for name in action_schema.get("required", []) if name in properties]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    if "$defs" in action_schema:
        parameters["$defs"] = action_schema["$defs"]
    return Tool("step", action_schema.get("description") or "Act in the environment.", parameters)
