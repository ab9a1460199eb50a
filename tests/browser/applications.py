"""Factories of applications with pages, for uvicorn; none of them is started by `errata serve`."""

from __future__ import annotations

from fastapi import FastAPI
from openenv.core.env_server import create_app as upstream_create_app

from errata_server import adopt, create_app
from tests.environments.ledger import LedgerAction, LedgerEnvironment, LedgerObservation


def ours() -> FastAPI:
    return create_app(LedgerEnvironment, LedgerAction, LedgerObservation, env_name="ledger")


def adopted() -> FastAPI:
    return adopt(upstream_create_app(LedgerEnvironment, LedgerAction, LedgerObservation, env_name="ledger"))


def mounted() -> FastAPI:
    """Somebody else's application: it has no lifespan, and runs none of what it mounts."""
    outer = FastAPI()
    outer.mount("/name", ours())
    outer.mount("/adopted", adopted())
    return outer
