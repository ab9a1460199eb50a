"""``errata episodes`` and ``errata replay``: list, show and delete episodes, add rewards, print a step's payload."""

from __future__ import annotations

import json
import secrets
import time
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Column

from errata_protocol.environment import EnvironmentSpec
from errata_protocol.errors import InvalidRequest, JournalUnavailable, UnknownEpisode
from errata_protocol.payload import digest
from errata_protocol.printable import printable
from errata_protocol.replay import EpisodeDetail, RewardPost

from ..environments.discovery import published
from ..output_guard import write_exact
from .payloads import json_of, observation_in
from .source import DataDir, Json, Source, Url
from .tables import Table

cli = typer.Typer(help="List, show and delete episodes.", invoke_without_command=True, rich_markup_mode=None)


def cursor_of(text: str) -> str:
    """Check the argument of ``--cursor``: the number that an earlier list printed."""
    if not text.isdecimal() or len(text) > 18:
        raise typer.BadParameter(f"{text!r} is not a cursor that an earlier list printed")
    return text


@cli.callback()
def episodes(
    context: typer.Context,
    limit: Annotated[int, typer.Option(min=1, max=500, help="At most this many.")] = 20,
    cursor: Annotated[str | None, typer.Option(parser=cursor_of, metavar="N", help="Continue an earlier list.")] = None,
    environment: Annotated[str | None, typer.Option(help="Only of this environment.")] = None,
    error_kind: Annotated[str | None, typer.Option(help="Only with a turn marked with this kind.")] = None,
    episode_id: Annotated[str | None, typer.Option(help="Only with this alias, which the client chose.")] = None,
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """List episodes, newest first."""
    if context.invoked_subcommand is not None:
        return
    query = {"limit": limit, "cursor": cursor, "environment": environment}
    query |= {"error_kind": error_kind, "episode_id": episode_id}
    with Source(data_dir, url) as source:
        page = source.page(query)
    if as_json:
        typer.echo(json.dumps(page.model_dump(mode="json")))
        return
    headings = ("environment", "age", "turns", "reward", "done", "error kinds")
    table = Table(Column("eid", no_wrap=True, min_width=27), *headings)
    for e in page.episodes:
        kinds = " ".join(f"{kind}:{n}" for kind, n in e.error_kinds.items())
        table.add(
            e.eid, e.environment, _age(e.created), str(e.deliveries), f"{e.reward:g}", "yes" if e.done else "", kinds
        )
    table.print()
    if page.next is not None:
        typer.echo(printable(f"more: the same command with --cursor {page.next}"))


@cli.command("show")
def show(eid: str, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Show the turns of one episode."""
    with Source(data_dir, url, eids=[eid]) as source:
        _print_detail(source.detail(eid), as_json)


@cli.command("rewards")
def rewards(eid: str, data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """List the rewards that came after their step."""
    with Source(data_dir, url, eids=[eid]) as source:
        found = source.rewards(eid)
    if as_json:
        typer.echo(json.dumps([r.model_dump() for r in found]))
        return
    table = Table("t", "value", "source", "reward id")
    for r in found:
        table.add(str(r.t), f"{r.value:g}", r.source, r.reward_id)
    table.print()


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
        raise InvalidRequest(f"not a reward: {error.errors(include_url=False)[0]['msg']}") from error
    with Source(data_dir, url, eids=[eid], writes=True) as opened:
        made = opened.reward(eid, post)
    line = f"{eid}: t={made.t} {made.value:g} from {made.source}, reward id {made.reward_id}"
    typer.echo(json.dumps(made.model_dump(mode="json")) if as_json else printable(line))


@cli.command("delete")
def delete(eids: list[str], data_dir: DataDir = None, url: Url = None, as_json: Json = False) -> None:
    """Delete episodes and the sandbox layers that only they use."""
    deleted: dict[str, int] = {}
    missing: UnknownEpisode | None = None
    with Source(data_dir, url, eids=eids, writes=True) as source:
        for eid in eids:
            try:
                deleted[eid] = source.delete(eid)
            except UnknownEpisode as error:
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
    data_dir: DataDir = None,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Print the exact bytes of a step after checking their digest.

    They are the bytes that the agent was sent at step T.
    """
    with Source(data_dir, url, eids=[eid]) as source:
        if t is None:
            _print_detail(source.detail(eid), as_json)
            return
        payload, expected, kind = source.state(eid, t)
        if digest(payload) != expected:
            raise JournalUnavailable(f"t={t} of {eid} does not match its digest {expected}: the journal is damaged")
        if agent_text:
            environment = source.detail(eid).environment
            if environment not in published():
                raise InvalidRequest(
                    f"the environment {environment!r} is not installed here: its agent_text is unknown"
                )
            spec = published()[environment].load()
            text = _agent_text(spec, payload)
            read = {"agent_text": text, "agent_text_version": spec.agent_text_version}
            typer.echo(json.dumps({"eid": eid, "t": t, "kind": kind, "digest": expected, **read}) if as_json else text)
        elif as_json:
            typer.echo(json.dumps({"eid": eid, "t": t, "kind": kind, "digest": expected, "data": json_of(payload)}))
        else:
            write_exact(payload)


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


def _print_detail(detail: EpisodeDetail, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(detail.model_dump(mode="json")))
        return
    done = ", done" if detail.done else ""
    typer.echo(printable(f"{detail.eid} of {detail.environment}, reward {detail.reward:g}{done}"))
    if detail.origin is not None:
        typer.echo(printable(f"forked from {detail.origin.eid} at t={detail.origin.t}"))
    table = Table("t", "kind", "reward", "error kind", "hint", "digest")
    for turn in detail.turns:
        reward = "" if turn.reward is None else f"{turn.reward:g}"
        short = turn.digest.removeprefix("sha256:")[:16]
        table.add(str(turn.t), turn.kind, reward, turn.error_kind or "", turn.hint_template_key or "", short)
    table.print()


def _age(created: float) -> str:
    """Return the time since a moment, rounded down to a whole unit."""
    seconds = max(0, int(time.time() - created))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"
