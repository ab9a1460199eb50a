"""The fake backend, taught the few commands with which the environment sets tasks up and grades them."""

from __future__ import annotations

import io
import json
import posixpath
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from errata_server.sandbox.base import CommandResult, Limits
from errata_server.sandbox.fake.backend import FakeBackend, FakeSandbox
from terminal_env.server import layers, verifier

Judge = Callable[[Mapping[str, bytes | None], dict[str, Any]], dict[str, Any] | None]


def full_marks(files: Mapping[str, bytes | None], request: dict[str, Any]) -> dict[str, Any]:
    """Judge everything as solved."""
    return {"nonce": request["nonce"], "score": 1.0, "checks": []}


@dataclass
class Script:
    """What a test wants to happen, and what happened.

    Args:
        judge: Stands for the program that judges: files and request in, verdict out; None gives no verdict.
        unpacked: How often a task was set up.
        runs: Command, keyword arguments and sandbox of every run.
    """

    judge: Judge = full_marks
    unpacked: int = 0
    runs: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)


class ScriptedSandbox(FakeSandbox):
    script: Script

    async def run(self, command: str, **options: Any) -> CommandResult:
        self.script.runs.append((command, options, self.id))
        if command == layers.UNPACK:
            self.script.unpacked += 1
            with tarfile.open(fileobj=io.BytesIO(options["stdin"])) as archive:
                for member in archive.getmembers():
                    content = archive.extractfile(member)
                    self._files[posixpath.join("/", member.name)] = content.read() if content else None
            return CommandResult(0, "", "")
        if command in (verifier.JUDGE, verifier.SCRIPT):
            await super().run(":", clean=True)
            verdict = self.script.judge(dict(self._files), json.loads(options["stdin"]))
            return CommandResult(0 if verdict else 1, json.dumps(verdict) + "\n" if verdict else "", "")
        if command == layers.CLAMP:
            return CommandResult(0, "", "")
        return await super().run(command, **options)


class ScriptedBackend(FakeBackend):
    """Sandboxes that follow one `Script`."""

    def __init__(self, script: Script | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.script = script or Script()

    def _new(self, base: str, limits: Limits | None) -> FakeSandbox:
        made = super()._new(base, limits)
        made.__class__ = ScriptedSandbox
        made.script = self.script  # type: ignore[attr-defined]
        return made


def write_task(root: Path, files: Mapping[str, str]) -> Path:
    """Write a task directory; ``task.toml``, ``instruction.md`` and ``tests/verify.py`` have defaults."""
    defaults = {
        "task.toml": '[metadata]\ndifficulty = "easy"\n',
        "instruction.md": "Do it.\n",
        "tests/verify.py": "from errata_verify import check\n\n\n@check()\ndef done():\n    assert False\n",
    }
    if "tests/test.sh" in files:
        del defaults["tests/verify.py"]
    for name, content in (defaults | dict(files)).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root
