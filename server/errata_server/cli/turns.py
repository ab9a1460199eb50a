"""Prints the turns of an episode as they arrive, one in memory at a time: what ``errata replay EID`` shows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import typer

from errata_protocol.bundle import (
    MAX_LINE_BYTES,
    BundleEnd,
    DeliveryRecord,
    EpisodeRecord,
    FailureRecord,
    parse_line,
)
from errata_protocol.environment import default_agent_text
from errata_protocol.errors import JournalUnavailable, RemoteProtocolError
from errata_protocol.payload import digest
from errata_protocol.printable import printable
from errata_protocol.task_names import task_of
from errata_protocol.turns import Turn, turn_of

from ..environments.discovery import published
from .payloads import json_of, observation_in
from .source import Source
from .turn_table import TurnTable


def show_turns(source: Source, eid: str, *, full: bool = False, as_json: bool = False) -> None:
    """Print the turns of an episode.

    Args:
        source: Where the episode is read.
        eid: The episode.
        full: Whether to print what the agent read of each turn.
        as_json: Whether to print a line of JSON for each turn instead of a table.

    Raises:
        UnknownEpisode: There is no such episode, or it belongs to another token.
        JournalUnavailable: A payload does not match its digest.
    """
    printer = _Json(full) if as_json else _Text(full, source.owner(eid))
    records = _Records(eid, printer)
    try:
        lines = _Lines(records.take)
        source.bundle([eid], lines.write, ancestors=False)
        lines.end()
        records.end()
    finally:
        printer.end()


class _Records:
    """Gives the records of one episode in a bundle to a printer.

    Args:
        eid: The episode.
        printer: Prints the turns.
    """

    def __init__(self, eid: str, printer: _Printer) -> None:
        self._eid = eid
        self._printer = printer
        self._begun = self._ended = False

    def take(self, line: bytes) -> None:
        """Take a line of the bundle.

        Raises:
            RemoteProtocolError: It cannot be read, or belongs to another episode.
            JournalUnavailable: A payload does not match its digest.
        """
        try:
            record = parse_line(line)
        except ValueError as error:
            raise RemoteProtocolError(f"a line of the episode cannot be read: {error}; check the URL") from error
        self._ended = isinstance(record, BundleEnd)
        if not isinstance(record, EpisodeRecord | DeliveryRecord | FailureRecord):
            return
        if record.eid != self._eid or self._begun is isinstance(record, EpisodeRecord):
            raise RemoteProtocolError(f"a line is not the next of episode {self._eid}: check the URL")
        if isinstance(record, EpisodeRecord):
            self._begun = True
            self._printer.begin(record)
            return
        if digest(record.payload_bytes) != record.digest:
            where = f"t={record.t}" if isinstance(record, DeliveryRecord) else f"an error after t={record.after_t}"
            raise JournalUnavailable(
                f"{where} of {record.eid} does not match its digest {record.digest}: it is damaged"
            )
        self._printer.turn(turn_of(record), record)

    def end(self) -> None:
        """Raise RemoteProtocolError if the bundle ended early."""
        if not (self._begun and self._ended):
            raise RemoteProtocolError(f"the turns of {self._eid} were cut off: it was deleted meanwhile, or try again")


class _Lines:
    """Splits bytes that arrive in parts into lines, and keeps only the last, incomplete one.

    Args:
        take: Called with each line.
    """

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, part: bytes) -> None:
        """Add the next bytes."""
        *whole, rest = part.split(b"\n")
        for line in whole:
            self._take(b"".join([*self._parts, line]))
            self._parts, self._size = [], 0
        self._parts.append(rest)
        self._size += len(rest)
        if self._size > MAX_LINE_BYTES:
            raise RemoteProtocolError(f"a line is longer than {MAX_LINE_BYTES:,} bytes: this is no episode bundle")

    def end(self) -> None:
        """Take the last line."""
        if last := b"".join(self._parts):
            self._take(last)


class _Printer:
    """Prints the turns of one episode.

    Args:
        full: Whether to print what the agent read of each turn.
    """

    def __init__(self, full: bool) -> None:
        self.full = full
        self._agent_text: Callable[[Mapping[str, Any]], str] | None = None

    def begin(self, episode: EpisodeRecord) -> None:
        """Take the record of the episode, which comes before its turns."""
        if not self.full:
            return
        version: str | None = None
        agent_text: Callable[[Any], str] = default_agent_text
        if episode.environment in published():
            spec = published()[episode.environment].load()
            version, agent_text = spec.agent_text_version, spec.agent_text
        if version == episode.agent_text_version:
            self._agent_text = agent_text
        else:
            made = f"{episode.environment} with agent_text {episode.agent_text_version}"
            typer.echo(
                printable(f"errata: --full prints observations as JSON: the text was made by {made}, and here is ")
                + (version or "none"),
                err=True,
            )

    def read_by_agent(self, record: DeliveryRecord | FailureRecord) -> str:
        """Return what the agent read of a reply: the environment's text of it, or else its JSON."""
        payload = record.payload_bytes
        if isinstance(record, FailureRecord) or record.kind == "mcp":
            return record.payload
        if self._agent_text is None:
            return default_agent_text(observation_in(payload))
        try:
            return self._agent_text(observation_in(payload))
        except Exception:  # it is the environment's code, and the observation may be another one's
            return json.dumps(json_of(payload), ensure_ascii=False)

    def turn(self, turn: Turn, record: DeliveryRecord | FailureRecord) -> None:
        """Print a turn."""
        raise NotImplementedError

    def end(self) -> None:
        """Print what is left."""


class _Json(_Printer):
    def turn(self, turn: Turn, record: DeliveryRecord | FailureRecord) -> None:
        line = {"eid": record.eid, **asdict(turn), "digest": record.digest}
        if self.full:
            line["agent_text"] = self.read_by_agent(record)
        typer.echo(json.dumps(line))


class _Text(_Printer):
    def __init__(self, full: bool, owner: str) -> None:
        super().__init__(full)
        self._owner = owner
        self._table: TurnTable | None = None
        self._episode: EpisodeRecord | None = None
        self._turns = self._failed = 0
        self._reward, self._done = 0.0, False

    def begin(self, episode: EpisodeRecord) -> None:
        super().begin(episode)
        self._episode = episode

    def turn(self, turn: Turn, record: DeliveryRecord | FailureRecord) -> None:
        origin = self._episode.origin if self._episode is not None else None
        if turn.t == 0 and origin is not None:  # what made it is no action of an agent
            turn = replace(turn, kind="fork", action=f"fork of {origin.eid} at t={origin.t}")
        self._head(record).add(turn, self.read_by_agent(record) if self.full else None)
        self._turns += turn.t is not None
        self._failed += turn.t is None
        self._reward += turn.reward or 0.0
        self._done = self._done or turn.done

    def end(self) -> None:
        if self._episode is None:
            return
        self._head(None).end()
        failed = f", {self._failed} failed requests" if self._failed else ""
        typer.echo(f"{self._turns} turns{failed}, reward {self._reward:g}{', done' if self._done else ''}")

    def _head(self, first: DeliveryRecord | FailureRecord | None) -> TurnTable:
        """Return the table; print the heading before, once: the first record may name the task."""
        if self._table is None:
            assert self._episode is not None
            typer.echo(printable(_heading(self._episode, self._owner, first)))
            self._table = TurnTable()
        return self._table


def _heading(episode: EpisodeRecord, owner: str, first: DeliveryRecord | FailureRecord | None) -> str:
    task = task_of(first.payload_bytes, first.request_bytes) if isinstance(first, DeliveryRecord) else None
    about = [f"{episode.eid} of {episode.environment}"]
    about += [f"task {task}"] if task is not None else []
    about += [f"owner {owner}"] if owner not in ("", "-") else []
    if episode.origin is not None:
        about.append(f"forked from {episode.origin.eid} at t={episode.origin.t}")
    return ", ".join(about)
