"""The tally environment: it adds numbers, and can fail in every way that a check needs."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import Callable
from typing import Any

SLEEP_S = 0.4
SITE_FIELDS = ("t", "action_field", "action_span", "file", "line", "column", "test_id", "source", "message")
NO_MARKER: dict[str, Any] = {
    "error_kind": None,
    "hint_template_key": None,
    "error_site": None,
    "error_sites": [],
    "severity": None,
}
ACTION = {
    "type": "object",
    "properties": {"n": {"type": "integer", "default": 1}, "do": {"type": "string", "default": ""}},
    "additionalProperties": False,
}


class InvalidAction(Exception):
    """The action is not valid."""


class MachineFailed(Exception):
    """The machinery failed, not the action."""


class Tally:
    """One instance.

    Args:
        wrong: Returns whether the server has a defect of that name.
        declared: Whether the observation's class declares the five marker fields; if not, a failed turn has them in
            metadata.
    """

    def __init__(self, wrong: Callable[[str], bool], declared: bool) -> None:
        self.wrong, self.declared = wrong, declared
        self.total: float = 0.0
        self.steps, self.failed = 0, 0
        self.again = False
        """Whether the instance was made for a fork."""
        self.episode_id: str | None = None

    def reset(self, episode_id: str | None) -> dict[str, Any]:
        """Set the sum to zero and begin an episode."""
        self.total, self.steps, self.episode_id = 0.0, 0, episode_id
        answer = self._answer(None)
        if self.declared and self.wrong("reset-without-fields"):
            for name in NO_MARKER:
                answer["observation"].pop(name, None)
        return answer

    async def step(self, action: Any, t: int) -> dict[str, Any]:
        """Execute an action; `t` is its delivery index.

        Raises:
            InvalidAction: The action is not valid.
            MachineFailed: ``do`` is ``crash``.
            ValueError: ``do`` is ``fail``.
        """
        known = isinstance(action, dict) and set(action) <= {"n", "do", "metadata"}
        if not known or type(action.get("n", 1)) is not int or not isinstance(action.get("do", ""), str):
            raise InvalidAction("an action has an integer n and a text do")
        n, do = action.get("n", 1), action.get("do", "")
        what = do.partition(" ")[0]
        if what == "fail":
            self.failed += 1
            raise ValueError("the tally is broken")
        if what == "crash":
            raise MachineFailed("the machine of the tally is gone")
        grows = random.random() if what == "random" else n
        if self.wrong("half-run-after-deadline"):
            self.total += grows
        if what == "sleep":
            await asyncio.sleep(SLEEP_S)
        if not self.wrong("half-run-after-deadline"):
            self.total += grows
        self.steps += 1
        answer = self._answer(float(n))
        observation = answer["observation"]
        answer["done"] = what == "done"
        if what == "big":
            observation["text"] = "x" * 300_000
        if what == "nan":
            observation["total"] = math.nan
        if what == "own":
            observation["metadata"]["error_kind"] = "own"
            if self.declared and not self.wrong("own-kind-without-field"):
                observation["metadata"] |= {"hint_template_key": None, "error_site": None}
                observation |= {"error_kind": "own", "severity": "error"}
        if self.wrong("failed-steps-are-turns"):
            t += self.failed
        if what == "mark" or (not self.declared and what == "own" and self.wrong("own-marker-overwritten")):
            self._mark(observation, do, t)
        return answer

    def add(self, n: Any) -> float:
        """The tool ``add``."""
        self.total += int(n)
        return self.total

    def _answer(self, reward: float | None) -> dict[str, Any]:
        fields = {k: list(v) if isinstance(v, list) else v for k, v in NO_MARKER.items()} if self.declared else {}
        if self.declared and self.wrong("severity-without-kind"):
            fields["severity"] = "error"
        if self.declared and self.wrong("key-without-kind"):
            fields["hint_template_key"] = "exec.nonzero"
        if self.declared and self.wrong("mirror-without-kind"):
            return {
                "observation": {"metadata": {"error_kind": None}, **fields, "total": self.total},
                "reward": reward,
                "done": False,
            }
        return {"observation": {"metadata": {}, **fields, "total": self.total}, "reward": reward, "done": False}

    def _mark(self, observation: dict[str, Any], do: str, t: int) -> None:
        sites = []
        for word in re.finditer(r"\S+", do):
            span = list(word.span())
            if self.wrong("span-in-bytes"):
                span = [len(do[:end].encode()) for end in span]
            if self.wrong("span-beyond"):
                span[1] = len(do) + 7
            message = f"{word[0]}: command not found"
            site = dict.fromkeys(SITE_FIELDS) | {
                "t": t - 1 if self.wrong("site-t-of-steps") else t,
                "action_field": None if self.wrong("span-without-field") else "do",
                "action_span": span,
                "source": "action",
                "message": f"{message}\nsecond line" if self.wrong("message-of-two-lines") else message,
            }
            if self.again and self.wrong("child-fails-otherwise"):
                site["action_span"] = [0, 0]
            if self.wrong("site-with-tenth-field"):
                site["confidence"] = 1.0
            sites.append(site)
        first = sites[-1] if self.wrong("site-is-not-first") and len(sites) > 1 else sites[0]
        marker = {
            "error_kind": "command_not_found",
            "hint_template_key": "cmd.missing",
            "error_site": first,
            "error_sites": sites,
            "severity": "error",
        }
        if self.declared or self.wrong("undeclared-fields"):
            observation.update(marker)
        if not self.declared:
            observation["metadata"].update(marker)
        elif not self.wrong("no-mirror"):
            observation["metadata"].update({k: marker[k] for k in ("error_kind", "hint_template_key", "error_site")})


def schemas(declared: bool) -> dict[str, Any]:
    """Return the body of ``GET /schema``."""
    names = ["metadata", "reward", "done", "total", "text", *(NO_MARKER if declared else ())]
    observation = {"type": "object", "properties": {name: {} for name in names}}
    state = {"type": "object", "properties": {"episode_id": {}, "step_count": {"type": "integer"}}}
    return {"action": ACTION, "observation": observation, "state": state}
