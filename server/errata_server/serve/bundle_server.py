"""Serves exported episode files (bundles) read-only, with the ``/episodes`` routes that a live server has."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response

from errata_os.input_files import open_regular
from errata_protocol.bundle import (
    MAX_LINE_BYTES,
    BundledEpisode,
    BundledReward,
    BundleHeader,
    BundleWriter,
    DeliveryRecord,
    FailureRecord,
    bundle_lines,
    index_bundle,
    parse_line,
)
from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.episode_lists import EVERY, NEWEST, EpisodeFilter, EpisodeOrder, ListPlace, aggregated
from errata_protocol.errors import InvalidRequest, JournalUnavailable, NotSupported, UnknownEpisode
from errata_protocol.payload import digest
from errata_protocol.printable import printable
from errata_protocol.replay import EpisodeAggregates, EpisodeDetail, EpisodePage, RewardRecord

from ..doors import http_routes
from ..doors.auth import guard
from ..episodes.interface import Delivered
from ..runtime.ownership import missing_delivery
from ..runtime.readiness import listed_without_details
from ..settings import Settings
from .server import Bind, checked_settings, run_read_only


class Archive:
    """The episodes of bundle files. Everything but payloads is held in memory; payloads are read when asked for.

    Args:
        files: Bundle files. If several have an episode, it is taken from the last file in the list: an earlier export
            of a running episode may hold less of it.

    Attributes:
        broken: Why a file cannot be used, by its name: it is not a bundle, has another version, or is damaged.

    Raises:
        InvalidRequest: None of the files can be used; the message is that of the first.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._episodes: dict[str, tuple[Path, BundledEpisode]] = {}
        self.broken: dict[str, str] = {}
        for file in files:
            try:
                with open_regular(file) as lines:
                    found = index_bundle(bundle_lines(lines))
            except InvalidRequest as error:
                self.broken[str(file)] = printable(f"{file}: {error.message}")
            except OSError as error:
                self.broken[str(file)] = printable(f"{file}: {error.strerror or error}")
            else:
                self._episodes |= {eid: (file, episode) for eid, episode in found.items()}
        if len(self.broken) == len(set(map(str, files))):
            raise InvalidRequest(next(iter(self.broken.values()), "name a bundle"))
        self._summaries = [episode.summary for _, episode in self._episodes.values()]

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def environments(self) -> list[str]:
        """Names of the environments that the episodes belong to, sorted."""
        return sorted({one.environment for one in self._summaries})

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None,
        wanted: EpisodeFilter = EVERY,
        order: EpisodeOrder = NEWEST,
        principal: str | None,
    ) -> EpisodePage:
        """Return one page of episodes.

        Args:
            limit: Largest number of episodes.
            cursor: ``next`` of the page before; None for the first page. One past the end gives an empty page.
            wanted: What the episodes have to be.
            order: What they are sorted by.
            principal: Ignored: an archive can be read by everyone who may use the server.

        Returns:
            The page. Its ``next`` is None if no further episode matches.

        Raises:
            InvalidRequest: The cursor is none, or one of a list in another order.
        """
        after = order.place_of(cursor) if cursor is not None else None
        return await asyncio.to_thread(self._page, limit, after, wanted, order)

    def _page(self, limit: int, after: ListPlace | None, wanted: EpisodeFilter, order: EpisodeOrder) -> EpisodePage:
        found = (one for one in self._summaries if wanted.matches(one) and order.is_after(one, after))
        page, last = order.page(found, limit)
        return EpisodePage(episodes=page, next=order.cursor(last) if last is not None else None)

    async def aggregates(
        self, *, bucket_s: int, wanted: EpisodeFilter = EVERY, principal: str | None
    ) -> EpisodeAggregates:
        """Return what episodes add up to, by the time of their creation.

        Raises:
            InvalidRequest: There are too many buckets or counts.
        """
        found = (one for one in self._summaries if wanted.matches(one))
        return await asyncio.to_thread(aggregated, found, bucket_s)

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode with its turns.

        Raises:
            UnknownEpisode: It is in none of the files.
        """
        return self._episode(eid)[1].detail

    async def rewards(self, eid: str, principal: str | None) -> list[RewardRecord]:
        """Return the late rewards of an episode.

        Raises:
            UnknownEpisode: It is in none of the files.
        """
        return self._episode(eid)[1].rewards

    async def delivered(self, eid: str, t: int, principal: str | None) -> Delivered:
        """Read delivery ``t`` of an episode from its file and check its digest.

        Raises:
            UnknownEpisode: The episode is in none of the files.
            StateOutOfRange: It has no delivery ``t``.
            NoReset: ``t`` is 0 and the episode began without a reset.
            JournalUnavailable: The payload does not match its digest: the file was changed.
        """
        file, episode = self._episode(eid)
        if t not in episode.places:
            raise missing_delivery(eid, t, episode.turns[-1].t if episode.turns else None)
        offset, length = episode.places[t]
        with open_regular(file) as lines:
            lines.seek(offset)
            held = lines.read(length)
        turn = episode.turn_at[t]
        try:
            record = parse_line(held)
        except ValueError:
            record = None
        if not isinstance(record, DeliveryRecord) or digest(record.payload_bytes) != turn.digest:
            raise JournalUnavailable(f"t={t} of {eid} does not match its digest: the file {file.name} is damaged")
        return Delivered(t, turn.kind, record.payload_bytes, turn.digest)

    async def bundle(self, eid: str) -> AsyncIterator[bytes]:
        """Yield the lines of a bundle of one episode, without those that it was forked from.

        Raises:
            UnknownEpisode: It is in none of the files; raised before the first line.
            JournalUnavailable: The file was changed; the bundle then lacks its end line.
        """
        file, episode = self._episode(eid)
        writer = BundleWriter()
        header = BundleHeader(created=episode.record.created, server=version("openenv-errata"), episodes=(eid,))
        yield writer.line(header)
        yield writer.line(episode.record)
        at, end = episode.span
        with open_regular(file) as lines:
            lines.seek(at)
            while at < end:
                held = await asyncio.to_thread(lines.readline, MAX_LINE_BYTES)
                at += len(held)
                try:
                    record = await asyncio.to_thread(parse_line, held)
                except ValueError as error:
                    raise JournalUnavailable(f"a line of {eid} cannot be read: {file.name} is damaged") from error
                if isinstance(record, DeliveryRecord | FailureRecord | BundledReward) and record.eid == eid:
                    yield await asyncio.to_thread(writer.line, record)
        yield writer.end()

    def _episode(self, eid: str) -> tuple[Path, BundledEpisode]:
        if eid not in self._episodes:
            raise UnknownEpisode(eid)
        return self._episodes[eid]


def archive_app(archive: Archive, settings: Settings, *, insecure: bool = False) -> FastAPI:
    """Create an application with the read routes of a live server over an archive."""
    app = FastAPI(title="Errata episode bundles", version="1.0.0")

    @app.get("/capabilities", tags=["Errata"])
    async def capabilities() -> dict[str, Any]:
        # 1 and not markers.VERSION: a bundle holds payloads as they were sent, maybe by an older server.
        offered = {"protocol": PROTOCOL_NAME, "extensions": {"error_markers": 1, "state_at": 1}, "recovery": "none"}
        return {"environments": {name: {**offered, "environment": name} for name in archive.environments}}

    @app.get("/health", tags=["Health"])
    async def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/ready", tags=["Errata"])
    async def ready(request: Request) -> dict[str, Any]:
        unusable = {"bundles": list(archive.broken.values())} if archive.broken else {}
        if http_routes.principal(request) is None and settings.tokens:
            unusable = listed_without_details(unusable)
        return {"status": "ready", "reasons": [], **({"unusable": unusable} if unusable else {})}

    http_routes.register_reads(app, archive)

    @app.get("/episodes/{eid}/bundle", tags=["Errata"])
    async def bundle(eid: str, ancestors: bool = False) -> Response:
        if ancestors:
            raise NotSupported("bundles are served without the episodes they were forked from: give ancestors=false")
        return await http_routes.streamed(archive.bundle(eid))

    http_routes.answer_errors(app)
    guard(app, settings, insecure=insecure)
    return app


def serve_archive(files: Sequence[Path], bind: Bind) -> None:
    """Serve bundle files until SIGTERM or SIGINT.

    Raises:
        InvalidRequest: See `Archive`; or other machines could use the server without a token, or the address cannot be
            listened on.
    """
    settings = checked_settings(Settings(), bind)
    archive = Archive(files)
    for why in archive.broken.values():
        print(f"errata: not served: {why}", file=sys.stderr)
    app = archive_app(archive, settings, insecure=bind.insecure)
    served = ", ".join(str(file) for file in files if str(file) not in archive.broken)
    run_read_only(app, bind, f"{len(archive)} episodes of {served}, read-only")
