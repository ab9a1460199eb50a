"""`Endpoint`: one member of a fleet, and the address of its sockets."""

from __future__ import annotations

from dataclasses import dataclass

from openenv.core.utils import convert_to_ws_url

from errata_protocol.fleet import PARAMETER, FleetMembers, State


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One member of a fleet.

    Args:
        shard: Name of the member's data directory, which its ids have in them; None where it has none.
        url: Base URL of the member; several members may share one.
        state: ``up``; ``draining`` where it serves its sessions and gets no new ones; ``down`` where its sessions wait
            for it; ``lost`` where they are lost.
    """

    shard: str | None
    url: str
    state: State

    @property
    def ws_url(self) -> str:
        """URL of a socket that reaches this member, also where several share its address."""
        url: str = convert_to_ws_url(self.url)
        return f"{url}/ws" if self.shard is None else f"{url}/ws?{PARAMETER}={self.shard}"


def endpoints_of(members: FleetMembers, url: str) -> list[Endpoint]:
    """Return members with their addresses.

    Args:
        members: The members.
        url: Base URL of those that name none.
    """
    return [Endpoint(one.shard, (one.url or url).rstrip("/"), one.state) for one in members.members]
