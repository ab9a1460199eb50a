"""Descriptions of tools as VeRL's parsers read them, and sampled turns as messages with tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema


class TurnParser:
    """Reads sampled turns with one of VeRL's parsers of tool calls.

    Args:
        tool_parser: VeRL's parser, `ToolParser.get_tool_parser`.
        tokenizer: Tokenizer of the student.
        tools: Descriptions of the student's tools for a chat template; see `errata_trainer.episodes.tools.schema_of`.

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


def tool_parser_of(tool_format: str | None, rollout: Mapping[str, Any], tokenizer: Any) -> ToolParser:
    """Return VeRL's parser of tool calls, and tell the tokenizer how they are written.

    transformers below 5.13, which VeRL needs, gives a tokenizer no ``response_template``, from which channels 2 and 3
    read where a turn's calls are.

    Args:
        tool_format: Name of the parser; None for the one in ``rollout.multi_turn.format``.
        rollout: VeRL's settings of rollouts.
        tokenizer: Tokenizer of the student; one that has a template keeps it.

    Raises:
        ValueError: No parser has this name.
    """
    parser = ToolParser.get_tool_parser(
        tool_format or (rollout.get("multi_turn") or {}).get("format") or "hermes", tokenizer
    )
    if getattr(tokenizer, "response_template", None) is None:
        tokenizer.response_template = response_template(parser, tokenizer)
    return parser


OPENINGS = ("tool_call_start_token", "tool_call_begin_token", "tool_calls_start_token")
CLOSINGS = ("tool_call_end_token", "tool_calls_end_token")
"""Attributes of VeRL's parsers with the text that opens or closes a call."""


def response_template(parser: ToolParser, tokenizer: Any) -> dict[str, Any]:
    """Return where reasoning and tool calls are in a turn, as transformers' ``response_template`` says it.

    Args:
        parser: VeRL's parser of tool calls. Without constant texts around a call the template says nothing of calls.
        tokenizer: Tokenizer of the student, whose chat template shows whether turns have reasoning in ``<think>``.
    """
    fields: dict[str, Any] = {}
    opening = next((getattr(parser, name) for name in OPENINGS if hasattr(parser, name)), None)
    closing = next((getattr(parser, name) for name in CLOSINGS if hasattr(parser, name)), None)
    if opening and closing:
        fields["tool_calls"] = {"open": opening, "close": closing, "repeats": True}
    if "<think>" in str(getattr(tokenizer, "chat_template", None) or ""):
        fields["reasoning_content"] = {"open": "<think>", "close": "</think>"}
    return {"defaults": {"role": "assistant"}, "fields": fields}


def parser_schema(tool: Mapping[str, Any]) -> OpenAIFunctionToolSchema:
    """Return the description of a tool as VeRL's parsers read it: of each argument only the type, which some need.

    Args:
        tool: Description for a chat template; see `errata_trainer.episodes.tools.schema_of`.
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
