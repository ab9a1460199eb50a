"""``errata episodes`` and ``errata replay``: list, show and delete episodes, add rewards, show what the agent did."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any, get_args

import typer
from pydantic import ValidationError

from errata_protocol.environment import EnvironmentSpec, default_agent_text
from errata_protocol.episode_lists import DAY_S, FILTERS, Sort, Status, check_cursor
from errata_protocol.errors import InvalidRequest, JournalUnavailable, Misdirected, UnknownEpisode
from errata_protocol.labels import MAX_STEP
from errata_protocol.payload import digest
from errata_protocol.printable import printable
from errata_protocol.replay import EpisodeDetail, EpisodeSummary, RewardPost

from ..environments.discovery import published
from ..output_guard import write_exact
from .payloads import json_of, observation_in
from .source import DataDir, Json, Place, Source, Url
from .sums import show_sums
from .tables import Column, Table
from .times import span, when
from .turns import show_turns

cli = typer.Typer(
    help="List, show, export and delete episodes; add rewards.", invoke_without_command=True, rich_markup_mode=None
)


def cursor_of(text: str) -> str:
    """Check the argument of ``--cursor``: what an earlier list printed."""
    try:
        return check_cursor(text)
    except InvalidRequest as error:
        raise typer.BadParameter(error.message) from error


def _one_of(values: Sequence[str], help: str) -> Any:
    def parse(text: str) -> str:
        if text not in values:
            raise typer.BadParameter(f"{text!r} is none of {', '.join(values)}")
        return text

    return typer.Option(parser=parse, metavar="|".join(values), help=help)


def _time(help: str) -> Any:
    return typer.Option(parser=when, metavar="WHEN", help=help)


@cli.callback()
def episodes(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most this many.")] = 20,
    cursor: Annotated[
        str | None, typer.Option(parser=cursor_of, metavar="TEXT", help="Continue an earlier list.")
    ] = None,
    sort: Annotated[str, _one_of(get_args(Sort), "What to sort by.")] = "created",
    order: Annotated[str, _one_of(("asc", "desc"), "Lowest or highest first.")] = "desc",
    environment: Annotated[str | None, typer.Option(help="Only of this environment.")] = None,
    task: Annotated[str | None, typer.Option(help="Only of this task.")] = None,
    status: Annotated[str | None, _one_of(get_args(Status), "Only with this status.")] = None,
    error_kind: Annotated[str | None, typer.Option(help="Only with a turn marked with this kind.")] = None,
    episode_id: Annotated[str | None, typer.Option(help="Only with this alias, which the client chose.")] = None,
    text: Annotated[str | None, typer.Option(help="Only with this text in eid, alias or task.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="Only with at least this reward.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only with at most this reward.")] = None,
    created_from: Annotated[float | None, _time("Only created at this time or later.")] = None,
    created_before: Annotated[float | None, _time("Only created before this time.")] = None,
    last_from: Annotated[float | None, _time("Only with a delivery at this time or later.")] = None,
    last_before: Annotated[float | None, _time("Only without a delivery since this time.")] = None,
    group: Annotated[str | None, typer.Option(help="Only with this label, of rollouts to compare.")] = None,
    step: Annotated[
        int | None, typer.Option(min=0, max=MAX_STEP, help="Only with this label, of a training step.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="Only with this label, of a training run.")] = None,
    origin: Annotated[str | None, typer.Option(help="Only forks of this episode.")] = None,
    sums: Annotated[
        bool, typer.Option("--sums", help="Show what they add up to over time, instead of the list.")
    ] = False,
    bucket: Annotated[
        int | None, typer.Option(parser=span, metavar="SPAN", help="Length of a line of --sums. [default: 1d]")
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List episodes, newest first; or, with --sums, how many there were over time, with their rewards and errors.

    WHEN is an ISO time, such as 2026-05-01 or 2026-05-01T12:00, or 12h or 7d ago. SPAN is a length of
    time, such as 90s, 12h or 7d.
    """
    if context.invoked_subcommand is not None:
        return
    given = context.params
    wanted = {name: given[name] for name in FILTERS}
    if bucket is not None and not sums:
        raise typer.BadParameter("--bucket is for --sums")
    if sums:
        for name in ("limit", "cursor", "sort", "order"):
            source_of = context.get_parameter_source(name)
            if source_of is not None and source_of.name == "COMMANDLINE":
                raise typer.BadParameter(f"--sums is of all episodes that the filters have: leave --{name} out")
        with Source(data_dir, url) as source:
            show_sums(source.aggregates(DAY_S if bucket is None else bucket, wanted), source.seen, as_json=as_json)
        return
    query = {"limit": limit, "cursor": cursor, "sort": sort, "order": order, **wanted}
    with Source(data_dir, url) as source:
        page = source.page(query)
        places = [source.places(e.eid) for e in page.episodes]
        several = not source.is_remote and len(source.runtimes) > 1
    if as_json:
        listed = [_as_json(e, found) for e, found in zip(page.episodes, places, strict=True)]
        typer.echo(json.dumps({"episodes": listed, "next": page.next}))
        return
    columns: list[str | Column] = [Column("eid", whole=True), "environment", "task"]
    columns += [Column("turns", right=True, whole=True), Column("reward", right=True, whole=True)]
    columns += [Column("status", whole=True), "errors", Column("last", whole=True)]
    if not source.is_remote:
        columns.append(Column("owner", whole=True))
    if several:
        columns.append("journal")
    table = Table(*columns)
    for e, found in zip(page.episodes, places, strict=True):
        kinds = " ".join(f"{kind}:{n}" for kind, n in e.error_kinds.items())
        stands = e.status or ("done" if e.done else "")
        last = _age(e.last if e.last is not None else e.created)
        cells = [e.eid, e.environment, e.task or "", str(e.deliveries), f"{e.reward:g}", stands, kinds, last]
        if not source.is_remote:
            cells.append(found[0].owner if found else "")
        if several:
            cells.append(" ".join(place.directory.name for place in found))
        table.add(*cells)
    table.end()
    if page.next is not None:
        typer.echo(printable(f"more: the same command with --cursor {page.next}"))
    elif not page.episodes:
        print(f"errata: no such episode in {printable(source.seen)}", file=sys.stderr)


def _as_json(episode: EpisodeSummary, found: Sequence[Place]) -> dict[str, Any]:
    """Return an episode of a list for ``--json``; one from disk with its owner and its data directories."""
    shown = episode.model_dump(mode="json")
    if found:
        shown |= {"owner": found[0].principal, "data_dirs": [str(place.directory) for place in found]}
    return shown


@cli.command("show")
def show(eid: str, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Show the turns of one episode, as errata replay does.

    --json prints the episode as GET /episodes/EID answers it.
    """
    with Source(data_dir, url, eids=[eid]) as source:
        if as_json:
            typer.echo(json.dumps(source.detail(eid).model_dump(mode="json")))
        else:
            show_turns(source, eid)


@cli.command("rewards")
def rewards(eid: str, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """List the rewards that came after their step."""
    with Source(data_dir, url, eids=[eid]) as source:
        found = source.rewards(eid)
    if as_json:
        typer.echo(json.dumps([r.model_dump() for r in found]))
        return
    table = Table(Column("t", right=True), Column("value", right=True), "source", Column("reward id", whole=True))
    for r in found:
        table.add(str(r.t), f"{r.value:g}", r.source, r.reward_id)
    table.end()


@cli.command("reward", context_settings={"ignore_unknown_options": True})  # a value may be negative
def reward(
    eid: str,
    t: Annotated[int, typer.Argument(min=0, max=2**53 - 1, help="Delivery.")],
    value: float,
    source: Annotated[str, typer.Option(help="Name of what gives the reward, such as a grader.")],
    reward_id: Annotated[
        str | None,
        typer.Option("--id", help="Id of the reward; adding the same one again changes nothing. [default: a new one]"),
    ] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Add a reward to a step.

    If a server runs on the directory, it adds the reward.
    """
    try:
        post = RewardPost(t=t, value=value, source=source, reward_id=reward_id or f"cli-{secrets.token_hex(8)}")
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        raise InvalidRequest(f"not a reward: {wrong['loc'][0]}: {wrong['msg']}") from error
    with Source(data_dir, url, eids=[eid], writes=True) as opened:
        made = opened.reward(eid, post)
    line = f"{eid}: t={made.t} {made.value:g} from {made.source}, reward id {made.reward_id}"
    typer.echo(json.dumps(made.model_dump(mode="json")) if as_json else printable(line))


@cli.command("delete")
def delete(eids: list[str], data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Delete episodes and the sandbox layers that only they use."""
    deleted: dict[str, int] = {}
    missing: UnknownEpisode | Misdirected | None = None
    with Source(data_dir, url, eids=eids, writes=True) as source:
        for eid in eids:
            try:
                deleted[eid] = source.delete(eid)
            except (UnknownEpisode, Misdirected) as error:
                missing = error
    lines = [f"{eid}: {n} deliveries deleted" for eid, n in deleted.items()]
    typer.echo(json.dumps(deleted) if as_json else "\n".join(lines))
    if missing is not None:
        raise missing


def replay(
    eid: Annotated[str, typer.Argument(help="Episode.")],
    t: Annotated[
        int | None, typer.Argument(min=0, max=2**53 - 1, help="Delivery; without, all turns are listed.")
    ] = None,
    agent_text: Annotated[bool, typer.Option(help="Print what the agent read instead of the payload.")] = False,
    action: Annotated[bool, typer.Option("--action", help="Print the request of the step instead.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Print below each turn what the agent read.")] = False,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Show what the agent did, or print the exact bytes of a step.

    Without T: the turns, each with its action, in which «» mark what was wrong. With T: the bytes that the agent was
    sent at step T, after checking their digest; --action: those that it had sent. --json prints a line for each turn.
    """
    if full and t is not None:
        raise typer.BadParameter("--full is for all turns: leave T out, or give --agent-text")
    if agent_text and t is None:
        raise typer.BadParameter("--agent-text is for one turn: give T, or give --full for all")
    if action and (t is None or agent_text):
        raise typer.BadParameter("--action is for one turn, and for its request only: give T, and not --agent-text")
    with Source(data_dir, url, eids=[eid]) as source:
        if t is None:
            show_turns(source, eid, full=full, as_json=as_json)
            return
        if action:
            request = source.action(eid, t)
            if as_json:
                typer.echo(json.dumps({"eid": eid, "t": t, "action": json_of(request, "request")}))
            else:
                write_exact(request)
            return
        payload, expected, kind = source.state(eid, t)
        if digest(payload) != expected:
            raise JournalUnavailable(f"t={t} of {eid} does not match its digest {expected}: the journal is damaged")
        if agent_text:
            spec = _published(source.detail(eid))
            text = _agent_text(spec, payload) if spec is not None else default_agent_text(observation_in(payload))
            read = {"agent_text": text, "agent_text_version": spec.agent_text_version if spec is not None else None}
            typer.echo(json.dumps({"eid": eid, "t": t, "kind": kind, "digest": expected, **read}) if as_json else text)
        elif as_json:
            typer.echo(json.dumps({"eid": eid, "t": t, "kind": kind, "digest": expected, "data": json_of(payload)}))
        else:
            write_exact(payload)


def _published(episode: EpisodeDetail) -> EnvironmentSpec | None:
    """Return the environment of an episode, as installed here; None for one whose agents read the observation itself.

    Raises:
        InvalidRequest: It had an agent text and is not installed.
    """
    if episode.environment in published():
        spec: EnvironmentSpec = published()[episode.environment].load()
        return spec
    if episode.agent_text_version is not None:
        raise InvalidRequest(
            f"the environment {episode.environment!r} is not installed here: its agent_text is unknown"
        )
    return None


def _agent_text(spec: EnvironmentSpec, payload: bytes) -> str:
    """Return what the agent read of a payload, by the environment that is installed here."""
    observation = observation_in(payload)
    try:
        return spec.agent_text(observation)
    except Exception as error:  # it is the environment's code, and the observation may be another one's
        raise InvalidRequest(
            f"the environment {spec.name!r} that is installed here cannot read the payload: {type(error).__name__}: "
            f"{error}"
        ) from error


def _age(created: float) -> str:
    """Return the time since a moment, rounded down to a whole unit."""
    seconds = max(0, int(time.time() - created))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
