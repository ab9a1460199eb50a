"""`ReportingProvider`: a container provider of OpenEnv's that says why a container did not become ready."""

from __future__ import annotations

import subprocess
import time
from typing import Any

from openenv.core.containers.runtime.providers import ContainerProvider, LocalDockerProvider

LOOK_S = 2.0
"""Interval at which a container that is not ready yet is looked at, seconds."""

LOG_LINE = 1000
"""Most characters of a container's last line in an error message."""

_HELP = (
    "an image of Errata needs ERRATA_TOKEN or ERRATA_INSECURE=1 in env_vars=, and for sandboxes capabilities that this "
    "provider does not give: `docker compose up envs` gives them (docs/docker.md)"
)


class ReportingProvider(ContainerProvider):  # type: ignore[misc]  # openenv has no types
    """Passes everything on to another provider, and reports a container that ends before it is ready at once.

    Args:
        inner: The provider; None makes a `LocalDockerProvider` when the container is started.
    """

    def __init__(self, inner: ContainerProvider | None) -> None:
        self._inner = inner

    def start_container(
        self, image: str, port: int | None = None, env_vars: dict[str, str] | None = None, **more: Any
    ) -> str:
        """See `ContainerProvider`."""
        if self._inner is None:
            self._inner = LocalDockerProvider()
        url: str = self._inner.start_container(image, port, env_vars, **more)
        return url

    def stop_container(self) -> None:
        """See `ContainerProvider`."""
        if self._inner is not None:
            self._inner.stop_container()

    def wait_for_ready(self, base_url: str, timeout_s: float = 30.0) -> None:
        """Wait until the server answers.

        Raises:
            RuntimeError: The container has ended; the message has its last line and what to do.
            TimeoutError: It did not answer in time; the message likewise.
        """
        assert self._inner is not None
        if not isinstance(self._inner, LocalDockerProvider):
            self._inner.wait_for_ready(base_url, timeout_s)
            return
        container, deadline = str(self._inner._container_id), time.monotonic() + timeout_s
        while True:
            try:
                self._inner.wait_for_ready(base_url, min(LOOK_S, max(deadline - time.monotonic(), 0.0)))
                return
            except TimeoutError as error:
                if _docker("inspect", "--format", "{{.State.Running}}", container) == "false":
                    raise RuntimeError(f"the container ended: {_last_line(container)}; {_HELP}") from error
                if time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{base_url} was not ready within {timeout_s:g} s: {_last_line(container)}; {_HELP}"
                    ) from error


def _last_line(container: str) -> str:
    lines = _docker("logs", "--tail", "5", container).splitlines()
    return next((line[:LOG_LINE] for line in reversed(lines) if line.strip()), "its log is empty")


def _docker(*arguments: str) -> str:
    """Return what a command of docker printed, on both streams; empty where it failed."""
    try:
        done = subprocess.run(
            ["docker", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return "".join(
        char if char.isprintable() or char == "\n" else " " for char in done.stdout.decode(errors="replace")
    ).strip()
