"""The conformance suite on the docker backend: every promise of the seam, the same tests."""

from __future__ import annotations

import pytest

from errata_server.sandbox.base import Backend
from errata_server.sandbox.docker.backend import DockerBackend

from ..conformance import SandboxConformance

pytestmark = pytest.mark.containers


class TestDocker(SandboxConformance):
    @pytest.fixture
    async def backend(self, docker_backend: DockerBackend) -> Backend:
        return docker_backend
