"""Descriptions of tools as VeRL's parsers read them, and sampled turns as messages with tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from ...episodes.tools import Tool


class TurnParser:
    """Reads sampled turns with one of VeRL's parsers of tool calls.

    Args:
        tool_parser: VeRL's parser, `ToolParser.get_tool_parser`.
        tokenizer: Tokenizer of the student.
        tools: Descriptions of the student's tools for a chat template; see `schema_of`.

    Attributes:
        ends: Tokens that end a turn.
    """

    def __init__(self, tool_parser: ToolParser, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._parser, self._tokenizer = tool_parser, tokenizer
        self._schemas = [parser_schema(tool) for tool in tools]
        self.ends = frozenset({*tool_parser.stop_token_ids, tokenizer.eos_token_id})

    def stopping(self, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
        """Return settings of the generator with the tokens at which the parser wants it to stop.

        Args:
            sampling_params: VeRL's settings of the generator.
        """
        stops = {*(sampling_params.get("stop_token_ids") or ()), *self._parser.stop_token_ids}
        return {**sampling_params, **({"stop_token_ids": sorted(stops)} if stops else {})}

    async def message(self, ids: Sequence[int]) -> dict[str, Any]:
        """Return a turn as an assistant message; the arguments of its calls are text, as chat completions have them.

        Args:
            ids: Tokens that were sampled.
        """
        content, calls = await self._parser.extract_tool_calls(list(ids), self._schemas)
        end = self._tokenizer.eos_token
        message: dict[str, Any] = {"role": "assistant", "content": content.removesuffix(end) if end else content}
        if calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls
            ]
        return message


def schema_of(tool: Tool) -> dict[str, Any]:
    """Return the description of a tool for a chat template, as OpenAI's API has it."""
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
    }


def parser_schema(tool: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
    """Return the description of a tool as VeRL's parsers read it: of each argument only the type, which some need.

    Args:
        tool: Description for a chat template; see `schema_of`.
    """
    function = tool["function"]
    properties = function["parameters"].get("properties", {})
    types = {name: {"type": _types(schema)} for name, schema in properties.items()}
    parameters = {"type": "object", "properties": types, "required": function["parameters"].get("required", [])}
    return OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": {**function, "parameters": parameters}}
    )


def _types(schema: Mapping[str, Any]) -> str | list[str]:
    """Return the JSON types that a schema allows; all of them where it does not say."""
    if "type" in schema:
        found: str | list[str] = schema["type"]
        return found
    several = [kind for one in schema.get("anyOf", ()) for kind in _listed(_types(one))]
    return several or ["string", "integer", "number", "boolean", "array", "object", "null"]


def _listed(types: str | list[str]) -> list[str]:
    return [types] if isinstance(types, str) else types
