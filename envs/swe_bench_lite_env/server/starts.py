"""Creates the snapshot that a session starts from. Instances that ship with the package are prepared on first use."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from errata_environment.shared_builds import SharedBuilds
from errata_server.sandbox.base import Backend, Limits, Sandbox
from errata_server.settings import Settings

from ..dataset import Instance
from ..recipes import Recipe
from .prepare.build import Builder
from .prepare.images import inputs
from .prepare.store import Catalogue, NotPrepared, NotValidated, Prepared, Store

log = logging.getLogger("errata.swe")


class Starts:
    """Starts on one backend.

    Args:
        backend: Makes the sandboxes.
        store: The store of prepared instances.
    """

    def __init__(self, backend: Backend, store: Store) -> None:
        self._backend = backend
        self._catalogue = Catalogue(store, backend)
        self._building: SharedBuilds[str, object] = SharedBuilds(keep=False)

    async def open(
        self, instance: Instance, recipe: Recipe, limits: Limits, *, bundled: bool
    ) -> tuple[Prepared, Sandbox]:
        """Return an instance, and a new sandbox at its start.

        Args:
            instance: The instance.
            recipe: The recipe of the instance.
            limits: Limits of the sandbox.
            bundled: Whether the instance ships with the package: it is then prepared here if it is not yet, and the
                package's tests have validated it.

        Raises:
            NotPrepared: It was not prepared.
            NotValidated: It was not validated.
            EnvironmentFailed: A bundled instance cannot be built.
            SandboxFailed: The sandbox broke.
        """
        if bundled:
            await self._build(instance, recipe)
        try:
            return await self._catalogue.open(instance, recipe, validated=not bundled, limits=limits)
        except NotValidated as error:
            raise _without_names(error, instance, recipe) from error

    async def find(self, instance: Instance, recipe: Recipe, *, bundled: bool) -> Prepared:
        """Return an instance on which a session started earlier, without a new sandbox.

        Unlike `open`, it takes an instance that another version of the validator passed. The arguments and errors are
        those of `open`.
        """
        if bundled:
            await self._build(instance, recipe)
        try:
            return await self._catalogue.find(instance, recipe, validated=not bundled, outdated=True)
        except NotValidated as error:
            raise _without_names(error, instance, recipe) from error

    async def _build(self, instance: Instance, recipe: Recipe) -> None:
        """Prepare an instance where it is not yet: one build for all sessions that wait for it."""
        try:
            await self._catalogue.find(instance, recipe, validated=False)
            return
        except NotPrepared:
            pass
        builder = Builder(self._catalogue.store, self._backend, bases=Settings().base, progress=log.info)
        await self._building.get(instance.instance_id, lambda: builder.build(instance, recipe))


_starts: WeakKeyDictionary[Backend, Starts] = WeakKeyDictionary()


def starts_on(backend: Backend) -> Starts:
    """Return the starts that a backend holds, shared by all sessions on it."""
    store = Store()
    found = _starts.get(backend)
    if found is None or found._catalogue.store.directory != store.directory:
        found = _starts[backend] = Starts(backend, store)
    return found


def _without_names(error: NotValidated, instance: Instance, recipe: Recipe) -> NotValidated:
    """Return the error without what the validation found, which names tests; the log has it."""
    log.warning("%s", error.message)
    return NotValidated(
        f"{instance.instance_id} may not be served: its validation was not run, or did not pass. The server's log has "
        f"more; run `errata swe validate --dataset FILE {inputs(recipe)} --instance {instance.instance_id}`",
        instance_id=instance.instance_id,
    )
