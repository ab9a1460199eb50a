"""Scripted teachers for VeRL's task runner, which makes them by the name of `pairs`."""

from __future__ import annotations

from errata_client import Episodes
from errata_trainer.assembly.teacher_pairs import TeacherPairs
from errata_trainer.episodes.served import served_environment
from errata_trainer.teachers import Answer, FakeTeacher, Prompter, RawCall, TeacherPool

from ..environments.shelf import SPEC


def pairs(url: str, buffer: str) -> TeacherPairs:
    """Return pairs of two teachers who agree on another call at each failing one.

    Args:
        url: URL of the server.
        buffer: File of the pairs.
    """
    tools = served_environment(url, "shelf").tools.values()
    described = [{"name": one.name, "description": one.description, "parameters": one.parameters} for one in tools]
    answer = Answer(calls=(RawCall("step", '{"tool": "read", "path": "red"}'),))
    teachers = [FakeTeacher(answer, name=name) for name in ("a", "b")]
    prompter = Prompter(tools=described, agent_text=SPEC.agent_text)
    pool = TeacherPool(teachers, prompter, episodes=Episodes(url), deadline_s=30.0)
    return TeacherPairs(pool, buffer, wait_s=60.0)
