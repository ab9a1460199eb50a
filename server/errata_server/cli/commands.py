"""The entry point ``errata``: registers all commands, also those of entry points; prints errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path
from typing import Annotated, NamedTuple, NoReturn

import typer
from pydantic import SecretStr, ValidationError
from typer.core import TyperGroup

from errata_protocol.errors import ErrataError, InvalidRequest
from errata_protocol.exception_text import named_text_of
from errata_protocol.printable import printable

from .. import output_guard
from . import base_trees, bundles, data_dirs, doctor, episodes, journal, probe, source, view, workers
from .program_help import summary_of


def _one_of(*names: str) -> Callable[[str], str]:
    """Return a parser for an option that takes one of these names."""

    def choice(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}")
        return text

    return choice


_MODE = _one_of("simulation", "production")
_LEVEL = _one_of("debug", "info", "warning", "error")
_LOG_FORMAT = _one_of("auto", "text", "json")

_ORDER = "serve fleet environments init probe tasks doctor demo view episodes replay journal base bench ablate"
ORDER = tuple(_ORDER.split())
"""The order of commands in ``errata --help``, as users need them; others follow, ``version`` is last."""


class _InOrder(TyperGroup):
    """Lists commands in `ORDER`; typer would list those of groups last."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        names = super().list_commands(ctx)
        known = [name for name in ORDER if name in names]
        return [*known, *(name for name in names if name not in (*ORDER, "version")), "version"]


cli = typer.Typer(
    name="errata",
    cls=_InOrder,
    help="OpenEnv environments with error-site markers, state(t) replay and fork.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # it would interpret the brackets in the help texts as markup and not print them
)
cli.add_typer(episodes.cli, name="episodes")
for _command in bundles.cli.registered_commands:
    episodes.cli.registered_commands.append(_command)
cli.add_typer(bundles.cli, name="episode", hidden=True)  # the earlier name of the commands for bundles
cli.add_typer(journal.cli, name="journal")
cli.add_typer(base_trees.cli, name="base")
cli.add_typer(workers.cli, name="fleet")
cli.command("replay")(episodes.replay)
cli.command("view")(view.view)
cli.command("doctor")(doctor.doctor)
cli.command("probe")(probe.probe)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"errata {version('openenv-errata')}")
        raise typer.Exit


@cli.callback()
def errata(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """OpenEnv environments with error-site markers, state(t) replay and fork."""


@cli.command()
def serve(
    context: typer.Context,
    environments: Annotated[
        list[str],
        typer.Argument(metavar="ENVIRONMENT...", help="Installed environment, directory, or module:attribute."),
    ],
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    data_dir: source.ServersDir = None,
    workers: Annotated[
        str, typer.Option(metavar="N", help="Processes behind the address; auto: one for each core.")
    ] = "1",
    members: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="List of the members of the fleet that this server belongs to, file:///PATH. "
            "[default: ERRATA_MEMBERS, else none]",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token; better in ERRATA_TOKEN or ERRATA_TOKEN_FILE, which no process list shows."),
    ] = None,
    insecure: Annotated[bool, typer.Option(help="Accept other machines without a token.")] = False,
    base: Annotated[list[str] | None, typer.Option(help="Base tree of sandboxes, NAME=PATH; repeatable.")] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            parser=_MODE,
            metavar="MODE",
            help="simulation, or production: without HTTP reset, step and state, episodes, state(t) and fork. "
            "[default: OPENENV_MODE, else simulation]",
        ),
    ] = None,
    step_timeout: Annotated[
        float | None,
        typer.Option(
            min=1, help="Infrastructure deadline of a step, seconds. [default: ERRATA_STEP_TIMEOUT_S, else 900]"
        ),
    ] = None,
    max_sessions: Annotated[
        int | None, typer.Option(min=1, help="Environment instances at once. [default: 10000, or the application's]")
    ] = None,
    max_sessions_per_principal: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Environment instances at once for one token, in all environments together. "
            "[default: ERRATA_MAX_SESSIONS_PER_PRINCIPAL, else none]",
        ),
    ] = None,
    action: probe.ActionClass = None,
    observation: probe.ObservationClass = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            help="Continue and fork sessions without snapshots by running their requests again, under a hash seed that "
            "the data directory keeps. For all targets; errata probe checks whether it is true."
        ),
    ] = False,
    volatile: Annotated[
        str | None,
        typer.Option(
            metavar="PATH,...",
            help="Fields that may differ when requests run again, as messages print them: $.observation.result.took_s. "
            "One target only.",
        ),
    ] = None,
    detect: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME:]MAP",
            help="Mark failing steps: stdout=FIELD,stderr=FIELD,exit_code=FIELD[,command=ACTIONFIELD]; instead of "
            "exit_code, success=FIELD for a boolean or error=FIELD for what only a failure sets (MCP: error=error). "
            "With several targets once for each, with its NAME.",
        ),
    ] = None,
    allow_unchecked: Annotated[
        bool, typer.Option(help="Serve tasks that no check has passed (ERRATA_ALLOW_UNCHECKED=true).")
    ] = False,
    web: Annotated[bool, typer.Option(help="OpenEnv's web interface at /web, as ENABLE_WEB_INTERFACE=true.")] = False,
    fsync: Annotated[
        bool | None, typer.Option(help="Sync the journal before each reply. [default: ERRATA_FSYNC, else yes]")
    ] = None,
    salvage: Annotated[
        bool,
        typer.Option(
            "--salvage",
            help="Repair a damaged journal first: sessions with damaged rows are lost, others go on. "
            "[default: ERRATA_JOURNAL_SALVAGE]",
        ),
    ] = False,
    journal_store: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Installed store of the journal. [default: ERRATA_JOURNAL_STORE, else that of the data directory, "
            "else segments]",
        ),
    ] = None,
    lease: Annotated[
        Path | None,
        typer.Option(
            parser=source.directory,
            metavar="FILE",
            help="Lease of the data directory, where several boxes see it. [default: ERRATA_LEASE, else none]",
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the settings and who may use the server, and start nothing.")
    ] = False,
    log_format: Annotated[
        str,
        typer.Option(parser=_LOG_FORMAT, metavar="FORMAT", help="text, json, or auto: text at a terminal, else json."),
    ] = "auto",
    log_level: Annotated[str, typer.Option(parser=_LEVEL, metavar="LEVEL", help="debug ... error")] = "info",
) -> None:
    """Serve one environment, or several, each under /NAME.

    A single one is served at the root too.
    """
    from ..serve import hash_seed

    journal_dir = data_dir or data_dirs.of_targets(environments)
    several = workers != "1"
    if (lease := lease or _path_in_environment("ERRATA_LEASE")) is not None and not check:
        from ..serve.leased import own_directory

        journal_dir = own_directory(journal_dir, lease, journal_store, several=several, fsync=fsync)
    if (deterministic or several) and not check:
        hash_seed.fix(journal_dir)  # before the environment and its dependencies are imported

    from .. import log
    from ..recovery import recovery_class
    from ..runtime.shard_dirs import name_of, unserved
    from ..serve import server
    from ..settings import Settings
    from ..targets.load import Stated

    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    log.configure(as_json=as_json, level=log_level)
    if as_json:
        context.with_resource(log.printed_lines_logged())
    if data_dir is None and (earlier := data_dirs.left_behind(journal_dir)) is not None:
        log.say(
            f"the journal of earlier servers in {earlier} stays unchanged, and this server starts a new one in "
            f"{journal_dir}; to continue the earlier one, stop this server and give --data-dir {earlier}"
        )
    given: dict[str, object] = {"data_dir": journal_dir}
    if step_timeout is not None:
        given["step_timeout_s"] = step_timeout
    if max_sessions_per_principal is not None:
        given["max_sessions_per_principal"] = max_sessions_per_principal
    if fsync is not None:
        given["fsync"] = fsync
    if salvage:
        given["journal_salvage"] = True
    if journal_store is not None:
        given["journal_store"] = journal_store
    if lease is not None:
        given["lease"] = lease
    if members is not None:
        given["members"] = members
    if token is not None:
        os.environ.pop("ERRATA_TOKEN_FILE", None)  # the option overrides it
        given["token"] = SecretStr(token)
    if base:
        given["base"] = dict(_base(entry) for entry in base)
    bind = server.Bind(host, port, insecure)
    settings = Settings(**given)  # type: ignore[arg-type]
    count = 1
    if several:
        from .. import fleet

        if (count := fleet.count_of(workers)) > 1:
            if settings.members:
                raise InvalidRequest(
                    "--members lists servers of one process each: start one server for each data directory instead of "
                    "--workers, or leave --members out"
                )
            settings = fleet.shared_settings(settings, count)
    if check:
        server.checked_settings(settings, bind)
        log.say("the settings are valid; the environments were not loaded")
        raise typer.Exit
    if allow_unchecked:
        os.environ["ERRATA_ALLOW_UNCHECKED"] = "true"
    if web:
        os.environ["ENABLE_WEB_INTERFACE"] = "true"
    for left in unserved(journal_dir, count):
        log.say(f"{left} has the episodes of a worker of an earlier, larger --workers, and is not served")
    worker = None
    if count > 1:
        try:
            worker = fleet.supervise(journal_dir, bind, count, settings.health_port)
        except fleet.WorkerEnded as ended:
            raise typer.Exit(ended.status) from None
        if worker is None:
            return  # the supervisor, once all workers have ended
        settings = settings.model_copy(update={"data_dir": worker.join()})
    elif settings.members:
        name_of(journal_dir)  # a member has a name, which the ids that it makes have in them
    served = server.build(
        environments,
        settings,
        bind=bind,
        mode=mode,
        max_sessions=max_sessions,
        stated=Stated(action, observation),
        deterministic=deterministic,
        volatile=volatile or (),
        detect=detect,
    )
    if any(recovery_class(offered.recovery).repeats_requests for offered in served.capabilities.values()):
        # An environment's class or spec declares that it is deterministic; that is known only after loading it.
        hash_seed.fix(served.runtime.data_dir or journal_dir)
    if worker is not None:
        worker.enter(served)
    server.run(served, bind, worker)


def _path_in_environment(name: str) -> Path | None:
    """Return the path that a variable of the environment has; None where it is not set or empty."""
    return Path(text) if (text := os.environ.get(name)) else None


@cli.command("environments")
def list_environments(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """List installed environments.

    They are those with an entry point for Errata, and OpenEnv's own packages.
    """
    import json

    from ..environments.discovery import packages, published

    found = {name: f"{package.module}.{package.app}" for name, package in sorted(packages().items())}
    found |= {name: point.value for name, point in sorted(published().items())}
    if as_json:
        typer.echo(json.dumps(found))
    else:
        for name, value in found.items():
            typer.echo(f"{name:24} {value}")


@cli.command(context_settings={"ignore_unknown_options": True})
def demo(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Which demo, terminal without a name; then its own options."),
    ] = None,
) -> None:
    """Run a demo: terminal, swe, training, learning or fleet.

    The demos terminal and swe run a scripted agent and show markers, state(t), a crash and a fork. The demo fleet kills
    one of several workers beneath 2,000 sessions and counts every step.
    """
    options = arguments or []
    name = options.pop(0) if options and not options[0].startswith("-") else "terminal"
    demos = {point.name: point for point in entry_points(group="errata.demos")}
    if name not in demos and name in DEMOS_ELSEWHERE:
        _refuse_missing(f"demo {name}", DEMOS_ELSEWHERE[name])
    if name not in demos:
        raise typer.BadParameter(f"no demo {name!r}; there are: {', '.join(sorted(demos)) or 'none'}")
    output_guard.release_output()
    raise typer.Exit(demos[name].load()(options))


@cli.command("version")
def show_version(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
) -> None:
    """Print the versions of Errata, OpenEnv and Python."""
    import json
    import platform

    from errata_protocol.capabilities import PROTOCOL_NAME

    versions = {
        "errata": version("openenv-errata"),
        "protocol": PROTOCOL_NAME,
        "openenv": version("openenv"),
        "python": platform.python_version(),
    }
    typer.echo(json.dumps(versions) if as_json else "\n".join(f"{name:9}{value}" for name, value in versions.items()))


FORMATTED = frozenset({"ablate", "bench"})
"""Programs that format their own output, with progress lines, and print nothing of another party."""


def _add_program(point: EntryPoint) -> None:
    """Register a command that runs the program of an entry point of the group ``errata.programs``."""

    def run(arguments: Annotated[list[str] | None, typer.Argument(metavar="OPTION")] = None) -> None:
        program: Callable[[list[str]], int] = point.load()
        if point.name in FORMATTED:
            output_guard.release_output()
        raise typer.Exit(program(arguments or []))

    options = {"ignore_unknown_options": True}  # the program prints its own help
    cli.command(point.name, help=summary_of(point), add_help_option=False, context_settings=options)(run)


for _point in sorted(entry_points(group="errata.programs"), key=lambda point: point.name):
    _add_program(_point)


class Distribution(NamedTuple):
    """Another distribution of this project.

    Args:
        name: Name of the distribution on a package index.
        folder: Folder of a checkout that the distribution is made of.
    """

    name: str
    folder: str


BENCH = Distribution("openenv-errata-bench", "bench")
ELSEWHERE = {"ablate": BENCH, "bench": BENCH, "conformance": Distribution("openenv-errata-conformance", "conformance")}
"""Programs of other distributions of this project, and the distribution that has each."""
DEMOS_ELSEWHERE = {"learning": BENCH}
"""Demos of other distributions of this project, and the distribution that has each."""


def _refuse_missing(what: str, distribution: Distribution) -> NoReturn:
    """Say what to install for a program or demo that is not here, and end with exit status 2."""
    print(
        f"errata: {what} is a program of another distribution: pip install {distribution.name}, or in a checkout "
        f"pip install ./{distribution.folder}",
        file=sys.stderr,
    )
    raise typer.Exit(2)


def _add_missing(name: str, distribution: Distribution) -> None:
    """Register a command that says what to install for a program that is not here."""

    def run(arguments: Annotated[list[str] | None, typer.Argument(metavar="OPTION")] = None) -> None:
        _refuse_missing(name, distribution)

    about = f"Not installed: pip install {distribution.name}."
    options = {"ignore_unknown_options": True}
    cli.command(name, help=about, add_help_option=False, context_settings=options)(run)


for _name, _distribution in ELSEWHERE.items():
    if not entry_points(group="errata.programs", name=_name):
        _add_missing(_name, _distribution)


def _base(entry: str) -> tuple[str, Path]:
    """Parse NAME=PATH."""
    name, separator, path = entry.partition("=")
    if not separator or not name or not path:
        raise typer.BadParameter(f"--base takes NAME=PATH, not {entry!r}")
    return name, Path(path)


def main() -> None:
    """Run the command.

    An `ErrataError`, an invalid setting or an OSError is printed in one line, with exit status 1, and so is an
    exception that no command expects; ``ERRATA_TRACEBACK=1`` prints where that was raised.
    """
    output_guard.guard_output()
    try:
        cli()
    except ErrataError as error:
        _fail(error.message)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)[0]
        name = "_".join(str(part) for part in wrong["loc"])
        _fail(f"setting {name}: {wrong['msg']}")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of the pipe has ended
        sys.exit(1)
    except OSError as error:
        _fail(str(error))
    except MemoryError:
        _fail("this machine has too little memory for it: ask for less, or look whether the input is what you think")
    except Exception as error:
        if os.environ.get("ERRATA_TRACEBACK"):
            raise
        _fail(f"{UNEXPECTED} {named_text_of(error)}; please report it with what ERRATA_TRACEBACK=1 prints")


UNEXPECTED = "an error in Errata itself:"
"""Beginning of the line that stands for an exception that no command expects."""


def _fail(message: str) -> NoReturn:
    from .. import log

    log.fail(printable(message))
    sys.exit(1)
