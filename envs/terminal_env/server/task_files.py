"""The files of a task directory as its author left them: what may be there, how much of it, and how it is read.

A task directory comes from somewhere else. Nothing in it is opened that is not a regular file inside of it, and no
parser gets a text on which it would take more than a moment.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from errata_os.input_files import FileRefused, kind_of, read_file

MAX_TEXT_BYTES = 256 * 1024
"""Largest size of task.toml, instruction.md, a Dockerfile and .dockerignore, bytes."""

MAX_COMPOSE_BYTES = 64 * 1024
"""Largest size of a compose file, bytes: YAML takes the most time of these formats."""

MAX_FILES = 20_000
"""Most files, directories and links below a task directory."""

MAX_BYTES = 512 * 1024**2
"""Largest size of all files of a task directory together, bytes."""

MAX_DEPTH = 64
"""Deepest directory below a task directory, and deepest nesting in its YAML files."""

_READ = ("task.toml", "instruction.md", "setup.sh", "environment", "tests", "solution")

_COPIED = ("tests", "solution")
"""Directories that are copied for the grading, with the files that their links lead to."""

_MAX_KEY_PARTS = 32
_KEY_PART = r"""(?:(?<![\w-])[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+"""
_LONG_KEY = re.compile(f"(?:{_KEY_PART}){{{_MAX_KEY_PARTS}}}", re.ASCII)


class TaskInvalid(ValueError):
    """A task directory that cannot be used; the message names it and what to change."""


def check_files(root: Path) -> None:
    """Check that a task directory holds only regular files, directories and links, and not too much.

    Raises:
        TaskInvalid: It does not, or a link of ``tests`` or ``solution`` leads to something else than a file of the
            task, or a file that is read for its text is a link.
        OSError: A directory cannot be read.
    """
    size_bytes = 0
    for count, entry in enumerate(_entries(root), 1):
        name = os.path.relpath(entry.path, root)
        found = entry.stat(follow_symlinks=False)
        if stat.S_ISLNK(found.st_mode):
            if name in _READ:
                raise TaskInvalid(f"{name} is a symbolic link: put the file or directory itself there")
            if name.partition("/")[0] in _COPIED:
                _check_link(root, Path(entry.path), name)
        elif stat.S_ISREG(found.st_mode):
            size_bytes += found.st_size
        elif not stat.S_ISDIR(found.st_mode):
            raise TaskInvalid(f"{name} is {kind_of(found.st_mode)}: a task has files, directories and symbolic links")
        if count > MAX_FILES:
            raise TaskInvalid(f"it has more than {MAX_FILES:,} files: pack them into an archive")
        if size_bytes > MAX_BYTES:
            raise TaskInvalid(f"its files have more than {MAX_BYTES:,} bytes together")
        if name.count("/") > MAX_DEPTH:
            raise TaskInvalid(f"{name[:200]} is deeper than {MAX_DEPTH} directories")


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    """Yield what is below a directory without following links; not recursive."""
    waiting = [os.fspath(root)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False) and entry.name != "__pycache__":
                    waiting.append(entry.path)


def _check_link(root: Path, path: Path, name: str) -> None:
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise TaskInvalid(f"{name} is a symbolic link that leads nowhere: put the file there") from error
    if not target.is_relative_to(root.resolve()) or not target.is_file():
        raise TaskInvalid(f"{name} is a symbolic link that leads to no file of the task: put the file there")


def read_text(path: Path, limit_bytes: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file of a task directory.

    Args:
        path: The file.
        limit_bytes: Largest size of the file, bytes.

    Raises:
        TaskInvalid: It is not a regular file, too large, or not UTF-8.
        OSError: It cannot be read.
    """
    try:
        return read_file(path, limit_bytes, follow=False).decode()
    except FileRefused as error:
        raise TaskInvalid(error.message) from error
    except UnicodeDecodeError as error:
        raise TaskInvalid(f"{path.name} is not UTF-8: {error}") from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        TaskInvalid: As `read_text`; or it is not TOML, or nested too deeply.
        OSError: It cannot be read.
    """
    text = read_text(path)
    if _LONG_KEY.search(text):  # tomllib takes time with the square of a dotted key's parts
        raise TaskInvalid(f"{path.name}: a key has more than {_MAX_KEY_PARTS} parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise TaskInvalid(f"{path.name}: a value is nested too deeply") from None
    except ValueError as error:
        raise TaskInvalid(f"{path.name}: {error}") from error


def compose_services(path: Path) -> list[str]:
    """Return the names of the services in a compose file, sorted.

    The file is not made into values: with anchors and merge keys these can be exponentially larger than their text.

    Raises:
        TaskInvalid: As `read_text`; or it is not YAML, nested too deeply, or has no mapping of services.
        OSError: It cannot be read.
    """
    text = read_text(path, MAX_COMPOSE_BYTES)
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise TaskInvalid(f"{path.name}: nested deeper than {MAX_DEPTH} levels")
        services = _members(yaml.compose(text, Loader=yaml.SafeLoader)).get("services")
    except yaml.YAMLError as error:
        raise TaskInvalid(f"{path.name}: {' '.join(str(error).split())}") from error
    if not isinstance(services, yaml.MappingNode):
        raise TaskInvalid(f"{path.name}: it has no mapping `services`")
    return sorted(_members(services))


def _members(node: yaml.Node | None) -> dict[str, yaml.Node]:
    """Return the values of a mapping node by key, with those that its merge keys bring in; each node is read once."""
    found: dict[str, yaml.Node] = {}
    waiting, seen = [node], set[int]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or not isinstance(one, yaml.MappingNode):
            continue
        seen.add(id(one))
        for key, value in one.value:
            if key.tag == "tag:yaml.org,2002:merge":
                waiting += value.value if isinstance(value, yaml.SequenceNode) else [value]
            elif isinstance(key, yaml.ScalarNode):
                found.setdefault(key.value, value)
            else:
                raise TaskInvalid(f"line {key.start_mark.line + 1}: a key has to be text")
    return found
