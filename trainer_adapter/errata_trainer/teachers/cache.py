"""A cache of teachers' answers, in memory and on disk.

Each answer is a file, named by the sha256 of the question. Files are written beside their place and renamed, so a
killed process leaves no partial file. They contain no API key and no header.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .teacher import Answer, Prompt

LAYOUT = 1
"""Version of the files; another one is not read."""

_log = logging.getLogger(__name__)


def cache_key(prompt: Prompt, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return the cache key: everything that an answer depends on.

    Args:
        prompt: Prompt that was asked; its state, tools and version are part of the key.
        identity: The teacher's `Teacher.identity`: the model and its sampling parameters.
    """
    return {
        "state": prompt.state_digest,
        "tools": prompt.tools_digest,
        "prompt_version": prompt.version,
        "teacher": dict(identity),
    }


class AnswerCache:
    """Answers by cache key: the latest ones in memory, and all of them in a directory, if one is given.

    Args:
        directory: Directory of the files, made if missing; any number of processes can share it. None keeps answers in
            memory only.
        kept: Most answers that stay in memory.

    Attributes:
        damaged: Number of files that could not be read; such an answer is asked for again.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, *, kept: int = 4096) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._kept = kept
        self._latest: OrderedDict[str, Answer] = OrderedDict()
        self.damaged = 0
        if self._directory is not None:
            self._directory.mkdir(parents=True, exist_ok=True)

    def get(self, key: Mapping[str, Any]) -> Answer | None:
        """Return the cached answer, or None."""
        name = _name(key)
        if name in self._latest:
            self._latest.move_to_end(name)
            return self._latest[name]
        if self._directory is None:
            return None
        path = self._path(self._directory, name)
        try:
            data = json.loads(path.read_bytes())
            if data["layout"] != LAYOUT or data["key"] != json.loads(_text(key)):
                raise ValueError("another layout, or an answer to something else")
            answer = Answer.from_json(data["answer"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            self.damaged += 1
            _log.warning("cached answer %s cannot be read (%s): it is asked for again", path, error)
            return None
        self._keep(name, answer)
        return answer

    def put(self, key: Mapping[str, Any], answer: Answer) -> None:
        """Store an answer.

        Raises:
            OSError: The directory cannot be written; the answer is in memory then.
        """
        name = _name(key)
        self._keep(name, answer)
        if self._directory is None:
            return
        path = self._path(self._directory, name)
        path.parent.mkdir(exist_ok=True)
        text = json.dumps({"layout": LAYOUT, "key": key, "answer": answer.as_json()}, sort_keys=True)
        descriptor, beside = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(beside).replace(path)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise

    def _keep(self, name: str, answer: Answer) -> None:
        self._latest[name] = answer
        self._latest.move_to_end(name)
        while len(self._latest) > self._kept:
            self._latest.popitem(last=False)

    @staticmethod
    def _path(directory: Path, name: str) -> Path:
        return directory / name[:2] / f"{name}.json"


def _text(key: Mapping[str, Any]) -> str:
    return json.dumps(key, sort_keys=True, separators=(",", ":"))


def _name(key: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(key).encode()).hexdigest()
