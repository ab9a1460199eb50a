"""Reads the part of ``environment/Dockerfile`` that needs no image: where files go, who owns them, what is exported.

Harbor's tasks come with a Dockerfile. Many only put files somewhere (``WORKDIR``, ``COPY``, ``RUN mkdir``), which a
sandbox on the base tree can do too. `read` returns what to put where, and the lines that a sandbox cannot follow
(``RUN apt-get``, a second stage, another user): those need an image.

The agent is the only user of a sandbox and has the place of the image's root, so it owns the files that a Dockerfile
makes. Files in directories of the system (``/usr/local/bin``, ``/etc``) belong to root: an agent that could change
these directories could change the programs that grade it.
"""

from __future__ import annotations

import fnmatch
import json
import os
import posixpath
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from errata_os.input_files import kind_of, read_file
from errata_server.sandbox.spec import (
    DEFAULT_PATH,
    Directory,
    Entry,
    File,
    Owner,
    SpecRefused,
    Symlink,
    check_workdir,
)

from .task_files import MAX_BYTES, read_text

AGENTS = frozenset({"agent", "64000", "root", "0"})
"""Users that a Dockerfile may name: the agent, and root, whose place it takes."""

OWN = ("/workspace", "/home/agent", "/tmp", "/var/tmp")
"""Directories that belong to the agent in every sandbox."""

_SYSTEM = frozenset(
    {"bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr"}
)
_SHARED = frozenset({"home", "media", "mnt", "opt", "srv", "var"})
_SYSTEM_VAR = frozenset({"backups", "cache", "lib", "local", "lock", "log", "mail", "opt", "run", "spool"})
_KERNEL = frozenset({"dev", "proc", "sys"})
_HARBORS = frozenset({"logs", "solution", "tests"})
_RESERVED = _HARBORS | {"probe", "setup", "site", "verifier"}
"""Where other files are mounted while a task is set up, solved or graded."""

_FILE_COMMANDS = frozenset(
    {"chmod", "chown", "cp", "echo", "ln", "mkdir", "mv", "printf", "rm", "rmdir", "touch", "true", ":"}
)
_HARMLESS = frozenset(
    {"CMD", "ENTRYPOINT", "EXPOSE", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD", "SHELL", "STOPSIGNAL", "VOLUME"}
)
_DIRECTIVE = re.compile(r"#\s*(\w+)\s*=\s*(\S+)\s*")
_HEREDOC = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?:(:?[-+])([^{}]*))?\})", re.DOTALL)
_FLAG = re.compile(r"--([a-z]+)(?:=(\S+))?(?:\s+|$)")
_ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")


MAX_INSTRUCTIONS = 1000
"""Most instructions of a Dockerfile; an engine builds no more than some hundred."""

MAX_PLACED = 20_000
"""Most files, directories and links that a Dockerfile makes."""

MAX_VARIABLES = 1000
"""Most variables that ENV and ARG set."""

MAX_EXPANDED = 64 * 1024
"""Longest text after its variables were replaced, in characters: `ENV A=$A$A` doubles it with each line."""

_MAX_PATTERNS = 200
_MAX_PATH_PARTS = 128
_MAX_WORK = 4_000_000


class DockerfileInvalid(ValueError):
    """A Dockerfile that Docker could not build either, or that exceeds a bound: a source that is not there, an unknown
    instruction, a variable without end."""


@dataclass(frozen=True, slots=True)
class Line:
    """One instruction.

    Args:
        number: Number of the instruction's first line, from 1.
        text: Text of the instruction as written, continuation lines joined.
    """

    number: int
    text: str

    def __str__(self) -> str:
        text = " ".join(self.text.split())
        short = text if len(text) <= 160 else f"{text[:157]}..."
        return f"line {self.number}: {short}"


@dataclass(frozen=True, slots=True)
class Placed:
    """One entry of a `Copy`.

    Args:
        path: Absolute path inside the sandbox.
        source: File or symlink of the build context; None for a directory and for text of the Dockerfile itself.
        mode: Permission bits.
        text: Content where there is no source; None for a directory.
        owner: Owner inside the sandbox, ``agent`` or ``root``.
    """

    path: str
    source: Path | None
    mode: int
    text: bytes | None = None
    owner: Owner = "agent"

    @property
    def is_directory(self) -> bool:
        """Whether it is a directory."""
        return self.source is None and self.text is None

    def entry(self) -> Entry:
        """Return it as an entry of a `SandboxSpec`."""
        if self.is_directory:
            return Directory(self.path, owner="agent" if self.owner == "agent" else None)
        if self.source is not None and self.source.is_symlink():
            return Symlink(self.path, os.fspath(self.source.readlink()))
        content = self.text if self.source is None else read_file(self.source, MAX_BYTES, follow=False)
        return File(self.path, content or b"", self.mode, self.owner)


@dataclass(frozen=True, slots=True)
class Copy:
    """Files and directories of a ``COPY`` that comes after a `Run`; the agent makes them, parents first."""

    line: Line
    entries: tuple[Placed, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """A ``RUN`` of file commands, run by the agent.

    Args:
        line: Its line in the Dockerfile.
        command: Shell text.
        cwd: Working directory.
        env: Variables of ENV and ARG at that line.
    """

    line: Line
    command: str
    cwd: str
    env: Mapping[str, str]


@dataclass(slots=True)
class Recipe:
    """What a Dockerfile does to a sandbox.

    Args:
        workdir: The last ``WORKDIR``, or None.
        start: Files and links that exist before the first step, in order.
        steps: `Run`, and each `Copy` that comes after one, in order.
        env: Variables of ``ENV``.
        needs_image: Lines that cannot be followed, each with the reason.
        notes: Notes on what is not used, one line each.
    """

    workdir: str | None = None
    start: list[Placed | Symlink] = field(default_factory=list)
    steps: list[Copy | Run] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    needs_image: list[tuple[Line, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(context: Path) -> Recipe:
    """Read ``context/Dockerfile``.

    Args:
        context: The build context: the directory ``environment`` of a task.

    Raises:
        DockerfileInvalid: Docker could not build it either, or it is longer or makes more than a task needs.
        TaskInvalid: It is not a regular file, or too large.
        OSError: It cannot be read.
    """
    return _Reader(context).read(read_text(context / "Dockerfile"))


def instructions(text: str) -> Iterator[tuple[Line, str, str, tuple[tuple[str, bool, str], ...]]]:
    """Yield (line, instruction in capitals, its arguments, here-documents as (delimiter, quoted, text))."""
    rows = text.splitlines()
    escape, at = "\\", 0
    while at < len(rows) and (directive := _DIRECTIVE.fullmatch(rows[at].strip())):
        if directive[1].lower() == "escape":
            escape = directive[2]
        at += 1
    while at < len(rows):
        start = at
        parts: list[str] = []
        while at < len(rows):
            row = rows[at]
            at += 1
            if row.lstrip().startswith("#") or (parts and not row.strip()):
                continue  # a comment or an empty line inside an instruction does not end it
            stripped = row.rstrip()
            if stripped.endswith(escape):
                parts.append(stripped[:-1])
                continue
            parts.append(stripped)
            break
        joined = "".join(parts).strip()
        if not joined:
            continue
        name, _, rest = joined.partition(" ") if " " in joined else joined.partition("\t")
        name, rest = name.upper(), rest.strip()
        documents = []
        if name in ("COPY", "ADD", "RUN") and not rest.startswith("["):
            for quote, delimiter in _HEREDOC.findall(rest):
                body = []
                while at < len(rows) and rows[at].strip() != delimiter:
                    body.append(rows[at])
                    at += 1
                if at == len(rows):
                    raise DockerfileInvalid(f"line {start + 1}: the here-document {delimiter} has no end")
                at += 1
                documents.append((delimiter, bool(quote), "".join(f"{row}\n" for row in body)))
        yield Line(start + 1, joined), name, rest, tuple(documents)


class _Reader:
    def __init__(self, context: Path) -> None:
        self.context = context
        self.recipe = Recipe()
        self.cwd = ""
        self.arguments: dict[str, str] = {}
        self.made = set(OWN)
        self.stages = 0
        self.work = _Work()
        self.ignored = _Ignore.of(context, self.work)
        self.listed: list[Path] | None = None

    def read(self, text: str) -> Recipe:
        for number, (line, name, rest, documents) in enumerate(instructions(text), 1):
            if number > MAX_INSTRUCTIONS:
                raise DockerfileInvalid(f"{line}: it has more than {MAX_INSTRUCTIONS} instructions")
            follow = getattr(self, f"_{name.lower()}", None)
            if name in _HARMLESS:
                if name in ("CMD", "ENTRYPOINT"):
                    self._note(line, "is not run")
            elif follow is None:
                raise DockerfileInvalid(f"{line}: no Dockerfile instruction has this name")
            elif self.stages == 0 and name not in ("FROM", "ARG"):
                raise DockerfileInvalid(f"{line}: FROM has to come first")
            else:
                try:
                    follow(line, rest, documents)
                except _NeedsImage as reason:
                    self.recipe.needs_image.append((line, str(reason)))
                except ValueError as error:
                    if isinstance(error, DockerfileInvalid):
                        raise
                    raise DockerfileInvalid(f"{line}: {error}") from error
                if len(self.arguments) + len(self.recipe.env) > MAX_VARIABLES:
                    raise DockerfileInvalid(f"{line}: more than {MAX_VARIABLES} variables")
                copied = sum(len(step.entries) for step in self.recipe.steps if isinstance(step, Copy))
                if len(self.recipe.start) + copied > MAX_PLACED:
                    raise DockerfileInvalid(f"{line}: more than {MAX_PLACED:,} files, directories and links")
        if self.stages == 0:
            raise DockerfileInvalid("it has no FROM")
        self.recipe.workdir = self.cwd or None
        return self.recipe

    # instructions

    def _from(self, line: Line, rest: str, documents: object) -> None:
        self.stages += 1
        if self.stages > 1:
            raise _NeedsImage("a build of several stages")
        image = [word for word in rest.split() if not word.startswith("--")]
        if not image:
            raise DockerfileInvalid(f"{line}: FROM needs an image")
        if image[0].lower() != "scratch":
            self._note(line, "is not used: the base tree stands for it")

    def _arg(self, line: Line, rest: str, documents: object) -> None:
        for word in _words(rest):
            name, equals, value = word.partition("=")
            self.arguments.setdefault(name, self._expand(value) if equals else "")
            if equals:
                self.arguments[name] = self._expand(value)

    def _env(self, line: Line, rest: str, documents: object) -> None:
        words = _words(rest)
        if words and "=" not in words[0]:  # ENV NAME some text
            name, _, value = rest.partition(" ")
            pairs = [(name, value.strip())]
        else:
            pairs = [(name, value) for name, _, value in (word.partition("=") for word in words)]
        known = self._variables()
        for name, value in pairs:  # all of one instruction see the variables before it
            self.recipe.env[name] = _expand(value, known)

    def _workdir(self, line: Line, rest: str, documents: object) -> None:
        path = self._absolute(self._expand(_plain(rest)))
        try:
            check_workdir(path)
        except SpecRefused as error:
            raise _NeedsImage(str(error)) from error
        self._directory(path)
        self.cwd = path

    def _user(self, line: Line, rest: str, documents: object) -> None:
        name = self._expand(_plain(rest))
        if name.partition(":")[0] not in AGENTS:
            raise _NeedsImage(f"user {name}: a sandbox has one user, the agent")
        if name != "agent":
            self._note(line, "is not used: the agent takes root's place")

    def _copy(self, line: Line, rest: str, documents: tuple[tuple[str, bool, str], ...], *, add: bool = False) -> None:
        flags, words = _flags(rest)
        mode = None
        for name, value in flags:
            if name == "chmod":
                if not re.fullmatch("0?[0-7]{3}", value):
                    raise _NeedsImage(f"--chmod={value}: only octal modes are followed")
                mode = int(value, 8)
            elif name == "chown":
                if self._expand(value).partition(":")[0] not in AGENTS:
                    raise _NeedsImage(f"--chown={value}: a sandbox has one user, the agent")
            elif name == "from":
                raise _NeedsImage(f"files of another image or stage ({value})")
            elif name not in ("link",):
                raise _NeedsImage(f"the flag --{name}")
        words = [self._expand(word) for word in words]
        if len(words) < 2:
            raise DockerfileInvalid(f"{line}: it needs a source and a destination")
        *sources, target = words
        into = target.endswith("/") or target in (".", "..") or target.endswith("/.")
        path = self._absolute(target)
        into = into or path in self.made
        entries: list[Placed] = []
        texts = {delimiter: (quoted, text) for delimiter, quoted, text in documents}
        found: list[Path] = []
        for source in sources:
            if document := _HEREDOC.fullmatch(source):
                quoted, text = texts[document[2]]
                name = posixpath.join(path, document[2]) if into else path
                content = text if quoted else self._expand(text)
                entries.append(Placed(name, None, mode or 0o644, content.encode()))
            elif add and re.match(r"\w+://|git@", source):
                raise _NeedsImage("a download")
            else:
                found += self._sources(line, source)
        if add and any(one.name.endswith(_ARCHIVES) for one in found):
            raise _NeedsImage("an archive to unpack: use COPY, or unpack it in environment/")
        if len(found) + len(entries) > 1 and not into:
            raise DockerfileInvalid(f"{line}: several sources need a destination that ends with /")
        for one in found:
            if one.is_dir():
                entries += self._below(one, path, mode)
            else:
                name = posixpath.join(path, one.name) if into else path
                entries.append(_placed(name, one.resolve(), mode))
        is_directory = into or any(one.is_dir() for one in found)
        self._directory(path if is_directory else posixpath.dirname(path))
        for entry in entries:
            self._directory(entry.path if entry.is_directory else posixpath.dirname(entry.path))
        owned = [replace(entry, owner=self._owner(entry.path)) for entry in entries if not entry.is_directory]
        if not any(isinstance(step, Run) for step in self.recipe.steps):
            self.recipe.start += owned
            return
        later: list[Placed] = []
        for entry in owned:
            (later if self._may_write_in(posixpath.dirname(entry.path)) else self.recipe.start).append(entry)
        if later:
            self.recipe.steps.append(Copy(line, tuple(later)))

    def _add(self, line: Line, rest: str, documents: tuple[tuple[str, bool, str], ...]) -> None:
        self._copy(line, rest, documents, add=True)

    def _run(self, line: Line, rest: str, documents: object) -> None:
        flags, words = _flags(rest, split=False)
        if flags:
            raise _NeedsImage(f"the flag --{flags[0][0]}")
        if documents:
            raise _NeedsImage("a script")
        text = words[0]
        if text.startswith("["):
            text = " ".join(shlex.quote(word) for word in _json(text) or [text])
        env = self._variables()
        kept = [part for command in _commands(text) if (part := self._command(command, env))]
        if kept:
            self.recipe.steps.append(Run(line, " && ".join(kept), self.cwd or "/workspace", env))

    # parts

    def _command(self, words: list[str], env: Mapping[str, str]) -> str:
        """Return one simple command of a RUN as shell text, empty where there is nothing left to do."""
        name, arguments = words[0], words[1:]
        if name not in _FILE_COMMANDS:
            raise _NeedsImage(f"{name}: only {', '.join(sorted(_FILE_COMMANDS - {':'}))} are followed")
        paths = [_value(word, env) for word in arguments if not word.startswith("-")]
        if name == "rm" and all(
            path.startswith(("/var/lib/apt", "/var/cache/apt", "/tmp/", "/root/.cache")) for path in paths
        ):
            return ""
        if name in ("echo", "printf", "true", ":"):
            if ">" not in "".join(words):
                return ""
            at = next(index for index, word in enumerate(words) if word in (">", ">>"))
            paths = [_value(word, env) for word in words[at + 1 :]]
            if len(paths) != 1:
                raise _NeedsImage("a redirection")
        elif any(word in (">", ">>") for word in words):
            raise _NeedsImage("a redirection")
        if name == "chown":
            if paths[0].partition(":")[0] not in AGENTS:
                raise _NeedsImage(f"user {paths[0]}: a sandbox has one user, the agent")
            return ""
        if name == "chmod":
            paths = paths[1:]
        written = paths[-1:] if name in ("cp", "ln") else paths
        if name == "mkdir":
            if any(word.startswith(("-m", "--mode")) for word in arguments):
                raise _NeedsImage("mkdir with a mode: use chmod")
            for path in map(self._absolute, paths):
                if path.split("/")[1] not in _HARBORS:  # those are there when they are needed
                    self._directory(path)
            return ""
        of_system = [path for path in map(self._absolute, written) if self._owner(path) == "root"]
        if of_system:
            self._change_system(name, words, [_value(word, env) for word in words], of_system)
            return ""
        for path in map(self._absolute, written):
            directory = path if path in self.made else posixpath.dirname(path)
            self._directory(directory)
            if name != "chmod" and not self._may_write_in(directory):
                raise _NeedsImage(f"{path}: {directory} is the system's")
        return " ".join(words)

    def _change_system(self, name: str, words: list[str], values: list[str], paths: list[str]) -> None:
        """Do at the start what the agent may not do: links, and modes of files that were put there."""
        start = self.recipe.start
        if name == "ln" and len(words) == 4 and values[1] in ("-s", "-sf", "-fs", "-sfn"):
            into = paths[0] in self.made or values[3].endswith("/")
            path = posixpath.join(paths[0], posixpath.basename(values[2])) if into else paths[0]
            self._directory(posixpath.dirname(path))
            start.append(Symlink(path, values[2]))
            return
        if name == "chmod" and len(values) == 2 + len(paths):
            at = {entry.path: index for index, entry in enumerate(start) if isinstance(entry, Placed)}
            if all(path in at for path in paths) and re.fullmatch(r"0?[0-7]{3}|[ua]?\+x", values[1]):
                for path in paths:
                    placed = start[at[path]]
                    assert isinstance(placed, Placed)
                    mode = placed.mode | 0o111 if "x" in values[1] else int(values[1], 8)
                    start[at[path]] = replace(placed, mode=mode)
                return
        raise _NeedsImage(f"{paths[0]}: {posixpath.dirname(paths[0])} is the system's")

    def _owner(self, path: str) -> Owner:
        """Return who owns a file or directory at ``path``.

        Raises:
            _NeedsImage: Nothing can be there.
        """
        parts = path.split("/")[1:]
        top = parts[0]
        if top in _RESERVED:
            raise _NeedsImage(f"{path}: /{top} is for the grading")
        if top in _KERNEL:
            raise _NeedsImage(f"{path}: /{top} is the kernel's")
        return "root" if top in _SYSTEM or (top == "var" and parts[1:] and parts[1] in _SYSTEM_VAR) else "agent"

    def _may_write_in(self, directory: str) -> bool:
        """Say whether the agent may make files in ``directory``."""
        return directory != "/" and directory[1:] not in _SHARED and self._owner(directory) == "agent"

    def _directory(self, path: str) -> None:
        """Have the directory ``path``, and with it those above that are not the system's."""
        if path in self.made or path == "/":
            return
        above = posixpath.dirname(path)
        owner = self._owner(path)
        self._directory(above)
        self.made.add(path)
        if path.count("/") > 1 or path[1:] not in _SYSTEM | _SHARED:
            self.recipe.start.append(Placed(path, None, 0o755, owner=owner))

    def _sources(self, line: Line, source: str) -> list[Path]:
        pattern = posixpath.normpath(source.lstrip("/") or ".")
        if pattern == ".." or pattern.startswith("../"):
            raise DockerfileInvalid(f"{line}: {source} lies outside of environment/")
        self.work.spend(1)
        if any(char in pattern for char in "*?["):
            if self.listed is None:
                self.listed = sorted(self.context.rglob("*"))
            parts = _compiled(pattern)
            found = []
            for path in self.listed:
                self.work.spend(len(parts))
                if _match_parts(path.relative_to(self.context).parts, parts):
                    found.append(path)
        else:
            path = self.context / pattern
            found = [path] if path.exists() else []
        found = [path for path in found if not self.ignored.leaves_out(path)]
        root = self.context.resolve()
        if any(not path.resolve().is_relative_to(root) for path in found):
            raise DockerfileInvalid(f"{line}: {source} leads out of environment/")
        if not found:
            raise DockerfileInvalid(f"{line}: {source} is not in environment/")
        return found

    def _below(self, directory: Path, target: str, mode: int | None) -> list[Placed]:
        placed = []
        for path in sorted(directory.rglob("*")):
            self.work.spend(1)
            if "__pycache__" in path.parts or self.ignored.leaves_out(path):
                continue
            placed.append(_placed(posixpath.join(target, path.relative_to(directory).as_posix()), path, mode))
        return placed

    def _absolute(self, path: str) -> str:
        if path.count("/") > _MAX_PATH_PARTS:
            raise ValueError(f"a path has more than {_MAX_PATH_PARTS} parts")
        return posixpath.normpath(posixpath.join(self.cwd or "/workspace", path)).replace("//", "/")

    def _variables(self) -> dict[str, str]:
        return {"PATH": DEFAULT_PATH, "HOME": "/home/agent"} | self.arguments | self.recipe.env

    def _expand(self, text: str) -> str:
        return _expand(text, self._variables())

    def _note(self, line: Line, what: str) -> None:
        self.recipe.notes.append(f"environment/Dockerfile {line} {what}")


class _NeedsImage(Exception):
    """Raised for a line that cannot be followed, with the reason."""


class _Work:
    """Counts comparisons and files, so that no Dockerfile takes longer than a moment."""

    def __init__(self) -> None:
        self.left = _MAX_WORK

    def spend(self, count: int) -> None:
        """Count work; raise DockerfileInvalid if it is too much."""
        self.left -= count
        if self.left < 0:
            raise DockerfileInvalid("its COPY lines and .dockerignore take too long: name fewer files and patterns")


_Pattern = tuple[re.Pattern[str] | None, ...]
"""The parts of a pattern between slashes; None stands for ``**``, any number of directories."""


class _Ignore:
    """``.dockerignore``: patterns in order, the last that matches decides."""

    def __init__(self, context: Path, patterns: list[tuple[bool, _Pattern]], work: _Work) -> None:
        self.context = context
        self.patterns = patterns
        self.work = work
        self.known: dict[Path, bool] = {}

    @classmethod
    def of(cls, context: Path, work: _Work) -> _Ignore:
        path = context / ".dockerignore"
        rows = read_text(path).splitlines() if path.exists() else []
        words = [row.strip() for row in rows if row.strip() and not row.startswith("#")]
        if len(words) > _MAX_PATTERNS:
            raise DockerfileInvalid(f".dockerignore: more than {_MAX_PATTERNS} patterns")
        return cls(context, [(word.startswith("!"), _compiled(word.lstrip("!").strip("/"))) for word in words], work)

    def leaves_out(self, path: Path) -> bool:
        if path not in self.known:
            parts = path.relative_to(self.context).parts
            places = [parts[:count] for count in range(1, len(parts) + 1)]
            out = False
            for keeps, pattern in self.patterns:
                self.work.spend(len(places) * len(pattern))
                if any(_match_parts(place, pattern) for place in places):
                    out = not keeps
            self.known[path] = out
        return self.known[path]


def _compiled(pattern: str) -> _Pattern:
    """Prepare a pattern that matches as Go's filepath.Match does, with ``**`` for any number of directories."""
    return tuple(None if part == "**" else re.compile(fnmatch.translate(part)) for part in pattern.split("/"))


def _match_parts(parts: tuple[str, ...], pattern: _Pattern) -> bool:
    # Which numbers of leading parts the pattern matches so far: recursion over several ** would take exponential time.
    matched = {0}
    for part in pattern:
        if part is None:
            matched = set(range(min(matched), len(parts) + 1))
        else:
            matched = {at + 1 for at in matched if at < len(parts) and part.match(parts[at])}
        if not matched:
            return False
    return len(parts) in matched


def _placed(name: str, path: Path, mode: int | None) -> Placed:
    bits = path.lstat().st_mode
    if stat.S_ISDIR(bits):
        return Placed(name, None, 0o755)
    if not stat.S_ISREG(bits) and not stat.S_ISLNK(bits):
        raise DockerfileInvalid(f"{path.name} is {kind_of(bits)}: COPY takes files, directories and links")
    return Placed(name, path, mode or (0o755 if bits & 0o100 else 0o644))


def _flags(rest: str, *, split: bool = True) -> tuple[list[tuple[str, str]], list[str]]:
    flags, at = [], 0
    while found := _FLAG.match(rest, at):
        flags.append((found[1], found[2] or ""))
        at = found.end()
    rest = rest[at:]
    if not split:
        return flags, [rest]
    return flags, _json(rest) or _words(rest, plain=True)


def _json(text: str) -> list[str] | None:
    if not text.startswith("["):
        return None
    try:
        words = json.loads(text)
    except ValueError:
        return None  # Docker takes it for words, too
    return words if isinstance(words, list) and all(isinstance(word, str) for word in words) else None


def _words(text: str, *, plain: bool = False) -> list[str]:
    """Split as a Dockerfile does: quotes group; with ``plain`` they are dropped, else variables are still to come."""
    words, word, quote, started, at = [], "", "", False, 0
    while at < len(text):
        char = text[at]
        if quote:
            if char == quote:
                quote = ""
            elif char == "$" and quote == "'":
                word += "\\$"
            elif char == "\\" and quote == '"' and at + 1 < len(text) and text[at + 1] in '"\\':
                at += 1
                word += text[at]
            else:
                word += char
        elif char in "'\"":
            quote, started = char, True
        elif char == "\\" and at + 1 < len(text):
            at += 1
            word += "\\$" if text[at] == "$" else text[at]
            started = True
        elif char.isspace():
            if started or word:
                words.append(word)
            word, started = "", False
        else:
            word += char
        at += 1
    if quote:
        raise ValueError("a quote has no end")
    if started or word:
        words.append(word)
    return words


def _plain(text: str) -> str:
    words = _words(text)
    return " ".join(words)


def _expand(text: str, variables: Mapping[str, str]) -> str:
    size = len(text)

    def bounded(found: re.Match[str]) -> str:
        nonlocal size
        new = value(found)
        size += len(new) - len(found[0])
        if size > MAX_EXPANDED:
            raise ValueError(f"it is longer than {MAX_EXPANDED:,} characters with its variables replaced")
        return new

    def value(found: re.Match[str]) -> str:
        if found[1] is not None:
            return found[1] if found[1] == "$" else found[0]
        name = found[2] or found[3]
        current = variables.get(name)
        operator, word = found[4], found[5] or ""
        if operator and operator.endswith("-"):
            return current if (current if ":" in operator else current is not None) and current is not None else word
        if operator and operator.endswith("+"):
            return word if (current if ":" in operator else current is not None) else ""
        return current or ""

    return _VARIABLE.sub(bounded, text)


def _value(word: str, env: Mapping[str, str]) -> str:
    """Return a word of shell text without its quotes, its variables replaced."""
    return _expand("".join(shlex.split(word)), env)


def _commands(text: str) -> list[list[str]]:
    """Split shell text into simple commands; words keep their quotes.

    Raises:
        _NeedsImage: It is more than simple commands joined by ``&&`` or ``;``.
    """
    if re.search(r"`|\$\(|<", text):
        raise _NeedsImage("a script")
    lexer = shlex.shlex(text, posix=False, punctuation_chars=";&|()>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if word in ("&&", ";"):
                commands.append([])
            elif word in (">", ">>") or not set(word) <= set(";&|()>"):
                commands[-1].append(word)
            else:
                raise _NeedsImage(f"a script ({word})")
    except ValueError as error:
        raise DockerfileInvalid(f"RUN: {error}") from error
    commands = [command for command in commands if command]
    if commands and commands[0][0] == "set" and all(word.startswith("-") for word in commands[0][1:]):
        commands = commands[1:]
    return commands
