"""The command line by introspection: every command, what its parameters are, and how it ends.

A command that is added is found here, and with it in the tests that run all commands.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import io
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer
import typer.main
from typer.models import ArgumentInfo

from errata_server.cli import commands
from errata_server.log import JsonLines


@dataclass(frozen=True)
class Parameter:
    """A parameter of a command.

    Args:
        name: Name of the parameter, as Python has it.
        flag: The option as it is written, empty for a positional argument.
        required: Whether a call without it is refused.
        many: Whether it takes several values.
        takes: What it takes, as its help says it: a metavar, or the name of its type.
    """

    name: str
    flag: str
    required: bool
    many: bool
    takes: str

    def given(self, value: str) -> list[str]:
        """Return how it is written on a command line with a value."""
        return [self.flag, value] if self.flag else [value]


@dataclass(frozen=True)
class Command:
    """A command of ``errata``.

    Args:
        words: How it is called, such as ``("episodes", "show")``.
        parameters: What it takes.
    """

    words: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def __str__(self) -> str:
        return " ".join(self.words)


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    stdout: str
    stderr: str


class _Parsed(BaseException):
    """Ends a program as soon as its parser is complete."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def all_commands() -> list[Command]:
    """Return every command of ``errata``, those of programs of other packages included."""
    programs = {point.name: point for point in entry_points(group="errata.programs")}
    found: list[Command] = []
    for words, callback in _leaves(commands.cli):
        if words[0] in programs:
            found += _of_program(words[0], programs[words[0]].load())
        else:
            found.append(Command(words, tuple(_of_callback(callback))))
    return found


def run(*arguments: str) -> Ended:
    """Run ``errata`` in this process, as its entry point does."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    before = sys.argv, sys.stdout, sys.stderr
    root = logging.getLogger()
    handlers = root.handlers
    # A server of an earlier test may have left one, and a command would log JSON lines to it instead of printing.
    root.handlers = [handler for handler in handlers if not isinstance(handler.formatter, JsonLines)]
    sys.argv, sys.stdout, sys.stderr = ["errata", *arguments], out, err
    try:
        main()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.argv, sys.stdout, sys.stderr = before
        root.handlers = handlers
    return Ended(status, *(_text(stream) for stream in (out, err)))


def main() -> None:
    """Run the entry point of ``errata``, with its commands built once: that is most of what a refused call costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", _built)
        commands.main()


_built = functools.cache(typer.main.get_command)


def assert_harmless(ended: Ended) -> None:
    """Fail if a command printed what acts on a terminal, or a traceback."""
    assert "Traceback" not in ended.stderr and commands.UNEXPECTED not in ended.stderr, ended.stderr[:2000]
    for text in (ended.stdout, ended.stderr):
        wrong = {character for character in text if not character.isprintable()} - {"\n", "\t"}
        assert not wrong, f"{wrong!r} in {text[:2000]!r}"


def assert_refused(ended: Ended) -> None:
    """Fail unless a command ended with status 1 or 2 and one line that says why."""
    assert_harmless(ended)
    assert ended.status in (1, 2), ended
    assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n"), ended.stderr[:2000]
    assert len(ended.stderr) < 10_000


def _text(stream: io.TextIOWrapper) -> str:
    written = stream.buffer
    assert isinstance(written, io.BytesIO)
    return written.getvalue().decode()


def _leaves(app: typer.Typer, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Callable[..., Any]]]:
    for command in app.registered_commands:
        assert command.callback is not None
        yield (*words, command.name or command.callback.__name__.replace("_", "-")), command.callback
    for group in app.registered_groups:
        if group.hidden is True:  # an earlier name of commands that are in another group
            continue
        below = group.typer_instance
        assert below is not None and group.name is not None
        if below.info.invoke_without_command and below.registered_callback is not None:
            assert below.registered_callback.callback is not None
            yield (*words, group.name), below.registered_callback.callback
        yield from _leaves(below, (*words, group.name))


def _of_callback(callback: Callable[..., Any]) -> Iterator[Parameter]:
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        kind, *told = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if kind is typer.Context:
            continue
        info: Any = told[0] if told else None
        bare = parameter.default is inspect.Parameter.empty
        positional = isinstance(info, ArgumentInfo) or (info is None and bare)
        long = [one for one in (getattr(info, "param_decls", None) or ()) if one.startswith("--")]
        flag = "" if positional else (long or [f"--{name.replace('_', '-')}"])[0]
        many = "list" in str(kind)
        takes = f"{getattr(info, 'metavar', None)} {'path' if 'Path' in str(kind) else kind}"
        yield Parameter(name, flag, bare, many, takes.lower())


def _of_program(name: str, program: Callable[[Sequence[str]], int]) -> Iterator[Command]:
    """Yield the commands of a program that has an ``argparse`` parser, found by looking at the parser as it is used."""
    parser = _parser_of(program, ["--help"])
    if parser is None:  # one that chooses a program by its first argument
        module = sys.modules[program.__module__]
        for below in module.COMMANDS:
            parser = _parser_of(program, [below, "--help"])
            assert parser is not None, f"errata {name} {below} has no argparse parser"
            yield from _of_parser((name, below), parser)
        return
    yield from _of_parser((name,), parser)


def _parser_of(program: Callable[[Sequence[str]], int], arguments: list[str]) -> argparse.ArgumentParser | None:
    def parse(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        raise _Parsed(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "stdout", io.StringIO())
        try:
            program(arguments)
        except _Parsed as found:
            return found.parser
    return None


def _of_parser(words: tuple[str, ...], parser: argparse.ArgumentParser) -> Iterator[Command]:
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    own = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    for group in below:
        for name, one in group.choices.items():
            yield from _of_parser((*words, name), one)
    if not below:
        parameters = (_of_argparse(action) for action in own if not isinstance(action, argparse._HelpAction))
        yield Command(words, tuple(parameters))


def _of_argparse(action: argparse.Action) -> Parameter:
    flag = max(action.option_strings, key=len) if action.option_strings else ""
    required = action.required and (bool(flag) or action.nargs not in ("?", "*"))
    kind = getattr(action.type, "__name__", "text")
    return Parameter(action.dest, flag, required, action.nargs in ("*", "+"), f"{action.metavar} {kind}".lower())
