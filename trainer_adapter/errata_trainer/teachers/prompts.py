"""Prompts for teachers: what the student saw, and its tools.

A prompt is made from the journal's exact payloads up to and including delivery t by the environment's ``agent_text``,
which is what the student read of each observation. If there is no such state or text, it is made from the trainer's
transcript.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from errata_protocol.environment import default_agent_text
from errata_protocol.replay import StateAt, observation_of

from ..rollouts.rollout import Call, Turn
from .teacher import Prompt

PROMPT_VERSION = "1"
"""Changes whenever the prompt of any state would."""

INSTRUCTION = (
    "You take over from another agent in the middle of its task. What follows is all that it saw and did so far. "
    "Do what should be done next, and only that: answer with a call of one of the tools, or, if nothing is left to do, "
    "with the final answer. What the agent did before may be wrong."
)
"""The system message of every prompt, in front of the student's own."""

NO_RESULT = "[no result]"
"""Stands for the answer to a call that delivered nothing."""


class NotReadable(ValueError):
    """A state has no text for an agent, so the prompt has to be made from a transcript."""


@dataclass(frozen=True, slots=True)
class Prompter:
    """Makes the prompts for one environment.

    Attributes:
        tools: The student's tools, bare or in the form of chat requests.
        agent_text: Returns the text that the student reads of a decoded observation.
        agent_text_version: Version of ``agent_text``. Episodes shown by another version are not read with it; None does
            not check.
        instruction: System message, put before the student's own.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    agent_text: Callable[[Any], str] = default_agent_text
    agent_text_version: str | None = None
    instruction: str = INSTRUCTION

    @property
    def version(self) -> str:
        """Version of the prompts, for cache keys. The text itself is part of the state's digest."""
        return PROMPT_VERSION

    def from_states(
        self, states: Sequence[StateAt], turns: Sequence[Turn] = (), prompt: Sequence[Mapping[str, Any]] = ()
    ) -> Prompt:
        """Return the prompt at the last of ``states``.

        Args:
            states: States P_0 to P_t in order; those of a fork begin with its parent's.
            turns: The student's turns before this state. Deliveries behind the reset that no turn asked for were never
                seen by the student, and are left out.
            prompt: The student's messages before the episode.

        Raises:
            NotReadable: A state is a tool's result on MCP, or cannot be read.
        """
        if not states:
            raise NotReadable("there is no state")
        eid = states[-1].eid
        own = {state.t: state for state in states if state.eid == eid}
        before = [state for state in states if state.eid != eid or state.t == 0]
        messages = [*prompt, *({"role": "user", "content": self._text(state)} for state in before)]
        for turn in turns:
            if not turn.calls:
                continue
            messages.append({"role": "assistant", "content": "", "tool_calls": [_call(call) for call in turn.calls]})
            for call in turn.calls:
                state = own.get(call.t) if call.t is not None else None
                text = self._text(state) if state is not None else _failure(call)
                messages.append({"role": "tool", "name": call.name, "content": text})
        cwd = self._observation(states[-1]).get("cwd")
        absolute = cwd if isinstance(cwd, str) and cwd.startswith("/") else None
        return Prompt(self._chat(messages), self._functions(), "agent_text", self.version, absolute)

    def from_transcript(self, messages: Sequence[Mapping[str, Any]], cwd: str | None = None) -> Prompt:
        """Return the prompt after a conversation.

        Args:
            messages: Messages up to and including the one that the student answered to, in a trainer's form: ids of
                tool calls may be missing, and their arguments may be objects.
            cwd: Absolute working directory at the state; None if unknown.
        """
        return Prompt(self._chat(messages), self._functions(), "transcript", self.version, cwd)

    def _text(self, state: StateAt) -> str:
        try:
            return self.agent_text(self._observation(state))
        except NotReadable:
            raise
        except Exception as error:  # the environment's own code, on whatever was delivered
            raise NotReadable(f"agent_text failed at t={state.t} of episode {state.eid}: {error!r}") from error

    @staticmethod
    def _observation(state: StateAt) -> dict[str, Any]:
        payload = json.loads(state.payload) if state.kind != "mcp" else None
        if not isinstance(payload, dict) or not isinstance(payload.get("observation"), dict):
            raise NotReadable(f"t={state.t} of episode {state.eid} has no observation")
        return observation_of(payload)

    def _functions(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(
            tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in self.tools
        )

    def _chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
        """Return messages in the form of chat requests, with the instruction first."""
        rest = list(messages)
        instruction = self.instruction
        while rest and rest[0].get("role") in ("system", "developer"):  # templates take one system message
            instruction += f"\n\n{rest.pop(0).get('content') or ''}"
        chat: list[Mapping[str, Any]] = [{"role": "system", "content": instruction}]
        ids: list[tuple[str, str]] = []  # calls that have no answer yet: name and id
        for message in rest:
            role, content = message.get("role"), message.get("content") or ""
            if role == "tool":
                chat.append({"role": "tool", "tool_call_id": _answered(ids, message), "content": content})
                continue
            if not (calls := message.get("tool_calls")):
                chat.append({"role": role, "content": content})
                continue
            ids = []
            asked = []
            for number, call in enumerate(calls):
                function = call.get("function", call)
                arguments = function.get("arguments", {})
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, sort_keys=True)
                id_ = call.get("id") or f"call_{len(chat)}_{number}"
                ids.append((function["name"], id_))
                asked.append({"id": id_, "type": "function", "function": {"name": function["name"], "arguments": text}})
            chat.append({"role": role, "content": content, "tool_calls": asked})
        return tuple(chat)


def _answered(ids: list[tuple[str, str]], message: Mapping[str, Any]) -> str:
    """Return the id of the call that a tool message answers: the given id, else the first call of that name, else the
    first."""
    if isinstance(call_id := message.get("tool_call_id"), str):
        ids[:] = [entry for entry in ids if entry[1] != call_id]
        return call_id
    for entry in [entry for entry in ids if entry[0] == message.get("name")] or ids:
        ids.remove(entry)
        return entry[1]
    return "call_unknown"


def _call(call: Call) -> dict[str, Any]:
    return {"function": {"name": call.name, "arguments": call.arguments}}


def _failure(call: Call) -> str:
    site = call.marker.error_site if call.marker is not None else None
    return (site.message if site is not None else None) or NO_RESULT
