"""The lessons of projects as text, and the tokenizer that is made of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from errata_trainer.tiny import END, START

from .projects import KNOWN, NAMES, OPERATIONS, VALUES, Habits, Project, lessons
from .warmup import HEADER, Conversation, opening, tokenizer_for


def conversations(project: Project, habits: Habits, seed: int) -> Iterator[Conversation]:
    """Yield the lessons of a project as text."""
    for said, learnt in lessons(project, habits, seed):
        first = next(place for place, (role, _) in enumerate(said) if role not in ("user",))
        parts = [(opening({"role": role, "content": text} for role, text in said[:first]), False)]
        for place, (role, text) in enumerate(said[first:], first):
            if role in ("call", "garbled", "assistant"):
                words = text
                if role != "assistant":
                    call = json.dumps({"name": "run", "arguments": {"command": text}})
                    words = f"<tool_call>{call if role == 'call' else call[:-1]}</tool_call>"
                parts += [(HEADER, False), (f"{words}{END}", place >= learnt), ("\n", False)]
            else:
                parts.append((f"{START}{role}\n{text}{END}\n", False))
        yield parts


def tokenizer_of() -> Any:
    """Return the tokenizer of all projects."""
    words = (*VALUES, *NAMES, *OPERATIONS, *KNOWN)
    return tokenizer_for(conversations(Project(0), Habits(), 0), words)
