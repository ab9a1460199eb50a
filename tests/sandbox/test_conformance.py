"""The conformance suite against each backend of this machine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from errata_server.sandbox.base import Backend
from errata_server.sandbox.fake.backend import FakeBackend
from errata_server.sandbox.namespace.backend import NamespaceBackend

from .conformance import SandboxConformance


class TestFake(SandboxConformance):
    @pytest.fixture
    async def backend(self) -> AsyncIterator[Backend]:
        made = FakeBackend()
        await made.start()
        yield made
        await made.close()


@pytest.mark.sandbox
class TestNamespace(SandboxConformance):
    @pytest.fixture
    async def backend(self, namespace_backend: NamespaceBackend) -> Backend:
        return namespace_backend
