"""What ``errata serve`` says after its address (`server`): how sessions are recovered, and an example client."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence

from openenv.core.env_server.mcp_types import CallToolObservation
from openenv.core.env_server.types import Observation

from errata_protocol.capabilities import Capabilities

from ..app.factory import web_is_wanted
from ..recovery import recovery_class
from ..targets.load import Servable


def announcement_lines(
    found: Sequence[Servable],
    capabilities: Mapping[str, Capabilities],
    max_sessions: int | None,
    detected: Collection[str],
    url: str,
) -> list[str]:
    """Return the lines to say after the address of a server.

    Args:
        found: The environments.
        capabilities: Capabilities of each, by name.
        max_sessions: Limit of sessions that the operator gave; None if there is none.
        detected: Names of those with ``--detect``.
        url: Address of the server.
    """
    lines = []
    for one in found:
        lines.append(f"{one.name}: {_recovery_text(one, capabilities[one.name])}")
        if max_sessions is None and (advice := one.limit_advice()) is not None:
            lines.append(f"{one.name}: {advice.text}")
        has_tools = one.spec.observation_cls in (Observation, CallToolObservation)
        if has_tools and one.name not in detected and one.runtime is None:
            option = "--detect error=error" if len(found) == 1 else f"--detect {one.name}:error=error"
            lines.append(f"{one.name}: steps whose tool failed are marked only with {option}")
    if any("state_at" in offered.extensions for offered in capabilities.values()):  # not in production mode
        lines.append(f"what agents do, in the browser: {_to_connect(url)}/viewer/")
    if web_is_wanted():
        lines.append(f"web interface at {url}/web")
    return lines


def example(found: Sequence[Servable], url: str) -> str:
    """Return the text of a program that talks to a server.

    Args:
        found: The environments.
        url: Address of the server.
    """
    url = _to_connect(url)
    address = url if len(found) == 1 else f"{url}/{found[0].name}"
    return (
        "errata: to talk to it:\n"
        "    from errata_client import ErrataClient\n"
        f"    with ErrataClient({address!r}).sync() as env:\n"
        "        print(env.reset().observation)\n"
    )


def _to_connect(url: str) -> str:
    """Return an address of this machine instead of one that is for listening only."""
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def _recovery_text(servable: Servable, offered: Capabilities) -> str:
    fork = "and can be forked" if "fork" in offered.extensions else "and this mode has no fork"
    recovery = recovery_class(offered.recovery)
    if recovery.survives_restart:
        return f"recovery {recovery.name}: its sessions survive a restart {recovery.means} {fork}{recovery.caveat}"
    unknown = "" if isinstance(servable.factory, type) else ", as far as a function that makes it tells"
    return (
        f"recovery none{unknown}: its sessions cannot be forked and do not survive a restart; to find its recovery "
        f"class, run: errata probe {shlex.quote(servable.target)}"
    )
