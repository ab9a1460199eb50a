"""What a trainer needs to know of an environment: the tools that a student may call, how observations become text, and
the tool that closes an episode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any

from errata_protocol.environment import EnvironmentSpec, default_agent_text
from errata_protocol.errors import InvalidRequest

from .argument_schemas import arguments_of, text_of

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
        name: Name that the student calls.
        description: One or a few sentences on what the tool does.
        parameters: JSON schema of the tool's arguments, an object.
        constants: Fields of the action that have the same value in each call, such as the tool's name.
        fields: The environment's names of arguments, by the student's, where they differ.
        within: Field of the action that holds the arguments; None puts them beside the constants.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    constants: dict[str, Any] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    within: str | None = None

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
        named = {self.fields.get(name, name): value for name, value in given.items()}
        if self.within is None:
            return {**self.constants, **named}
        return {**self.constants, self.within: {**self.constants.get(self.within, {}), **named}}


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the description of a tool for a chat template, as OpenAI's API has it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


@dataclass(frozen=True, slots=True)
class PlayedEnvironment:
    """What a trainer needs of an environment: its tools and how to show its observations.

    Attributes:
        name: Name of the environment on its server.
        tools: Tools that the student may call, by name.
        agent_text: Returns the text that the student reads of a decoded observation.
        closing_tool: Tool that is called without arguments when the student stops before its episode is over; None
            calls none.
        agent_text_version: Version of ``agent_text``, which the server writes into each episode; None if unknown.
    """

    name: str
    tools: dict[str, Tool]
    agent_text: Callable[[Any], str] = default_agent_text
    closing_tool: str | None = None
    agent_text_version: str | None = None


def is_published(name: str) -> bool:
    """Return whether an installed package publishes an environment of this name."""
    return name in entry_points(group=GROUP).names


def published(name: str) -> PlayedEnvironment:
    """Return an installed environment by name, from the entry point of its package.

    Raises:
        InvalidRequest: No installed package publishes it.
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


def step_tool(action_schema: Mapping[str, Any], where: str = "the action") -> Tool:
    """Return the single tool ``step`` for an environment that publishes none: its parameters are the fields of the
    action.

    Args:
        action_schema: JSON schema of the action, as ``/schema`` has it.
        where: Name of the action in error messages.

    Raises:
        InvalidRequest: A field cannot be an argument of a tool; the message names it.
    """
    arguments = arguments_of(action_schema, where, without=["metadata"])
    description = text_of(action_schema.get("description"), where) or "Act in the environment."
    return Tool("step", description, arguments.parameters, arguments.constants, arguments.fields)
