"""Serves exported episode files (bundles) read-only, on the ``/episodes`` routes of a live server."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from errata_protocol.bundle import BundledEpisode, DeliveryRecord, index_bundle, parse_line
from errata_protocol.capabilities import PROTOCOL_NAME
from errata_protocol.errors import InvalidRequest, JournalUnavailable, UnknownEpisode
from errata_protocol.payload import digest
from errata_protocol.replay import EpisodeDetail, EpisodePage, RewardRecord

from ..doors import http_routes
from ..doors.auth import guard
from ..episodes.interface import Delivered
from ..runtime.ownership import missing_delivery
from ..settings import Settings
from .server import Bind, protected, run_reading


class Archive:
    """Episodes of bundles: all but payloads in memory, these read where they stand in the files.

    Args:
        files: Bundles. An episode that several have is taken from the last; earlier exports of one that went on may
            hold less of it.

    Raises:
        InvalidRequest: One is no bundle, of another version, or damaged.
        OSError: One cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._episodes: dict[str, tuple[Path, BundledEpisode]] = {}
        for file in files:
            try:
                with file.open("rb") as lines:
                    self._episodes |= {eid: (file, episode) for eid, episode in index_bundle(lines).items()}
            except InvalidRequest as error:
                raise InvalidRequest(f"{file}: {error.message}") from error
        self._newest = sorted(self._episodes.values(), key=lambda held: -held[1].record.created)

    def __len__(self) -> int:
        return len(self._episodes)

    @property
    def environments(self) -> list[str]:
        """Names of the environments whose episodes these are."""
        return sorted({episode.record.environment for _, episode in self._newest})

    async def page(
        self,
        *,
        limit: int,
        cursor: str | None,
        environment: str | None,
        error_kind: str | None,
        episode_id: str | None,
        principal: str | None,
    ) -> EpisodePage:
        """Return one page of episodes, newest first; whoever may ask may read them all."""
        found = []
        following: str | None = None
        for place in range(int(cursor) if cursor is not None else 0, len(self._newest)):
            summary = self._newest[place][1].summary
            if (
                environment in (None, summary.environment)
                and (error_kind is None or error_kind in summary.error_kinds)
                and episode_id in (None, summary.episode_id)
            ):
                if len(found) == limit:
                    following = str(place)
                    break
                found.append(summary)
        return EpisodePage(episodes=found, next=following)

    async def detail(self, eid: str, principal: str | None) -> EpisodeDetail:
        """Return an episode and its turns.

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
        """Return delivery t of an episode, its digest checked.

        Raises:
            UnknownEpisode: The episode is in none of the files.
            StateOutOfRange: It has no delivery t.
            NoReset: It began without a reset.
            JournalUnavailable: The file was changed.
        """
        file, episode = self._episode(eid)
        if t not in episode.places:
            raise missing_delivery(eid, t, episode.turns[-1].t if episode.turns else None)
        offset, length = episode.places[t]
        with file.open("rb") as lines:
            lines.seek(offset)
            held = lines.read(length)
        turn = episode.turns[bisect.bisect_left(episode.turns, t, key=lambda turn: turn.t)]
        try:
            record = parse_line(held)
        except ValueError:
            record = None
        if not isinstance(record, DeliveryRecord) or digest(record.payload_bytes) != turn.digest:
            raise JournalUnavailable(f"t={t} of {eid} does not match its digest: the file {file.name} is damaged")
        return Delivered(t, turn.kind, record.payload_bytes, turn.digest)

    def _episode(self, eid: str) -> tuple[Path, BundledEpisode]:
        if eid not in self._episodes:
            raise UnknownEpisode(eid)
        return self._episodes[eid]


def archive_app(archive: Archive, settings: Settings, *, insecure: bool = False) -> FastAPI:
    """Return an application that serves an archive as a live server serves its journal, for reading only."""
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
    async def ready() -> dict[str, Any]:
        return {"status": "ready", "reasons": []}

    http_routes.register_reads(app, archive)
    http_routes.answer_errors(app)
    guard(app, settings, insecure=insecure)
    return app


def serve_archive(files: Sequence[Path], bind: Bind) -> None:
    """Serve bundles until a signal.

    Raises:
        InvalidRequest: As `Archive`; or an unprotected public bind, or an address that cannot be listened on.
    """
    settings = protected(Settings(), bind)
    archive = Archive(files)
    app = archive_app(archive, settings, insecure=bind.insecure)
    run_reading(app, bind, f"{len(archive)} episodes of {', '.join(str(file) for file in files)}, read-only")
