"""Scripted teachers for VeRL's task runner, which makes them by the name of `pairs`."""

from __future__ import annotations

import json

from errata_client import Episodes
from errata_trainer.assembly.teacher_pairs import TeacherPairs
from errata_trainer.demo.script import LOOK
from errata_trainer.episodes.served import served_environment
from errata_trainer.teachers import Answer, FakeTeacher, Prompter, RawCall, TeacherPool

from ..environments.shelf import SPEC

BETTER = {"shelf": ("step", {"tool": "read", "path": "red"}), "terminal": LOOK}
"""Call that the teachers agree on, by environment."""


def pairs(url: str, buffer: str, env: str = "shelf") -> TeacherPairs:
    """Return pairs of two teachers who agree on another call at each failing one.

    Args:
        url: URL of the server.
        buffer: File of the pairs.
        env: Name of the environment.
    """
    environment = served_environment(url, env)
    tools = environment.tools.values()
    described = [{"name": one.name, "description": one.description, "parameters": one.parameters} for one in tools]
    name, arguments = BETTER[env]
    answer = Answer(calls=(RawCall(name, json.dumps(arguments)),))
    teachers = [FakeTeacher(answer, name=name) for name in ("a", "b")]
    text = SPEC.agent_text if env == "shelf" else environment.agent_text
    prompter = Prompter(tools=described, agent_text=text)
    pool = TeacherPool(teachers, prompter, episodes=Episodes(url), deadline_s=30.0)
    return TeacherPairs(pool, buffer, wait_s=60.0)
