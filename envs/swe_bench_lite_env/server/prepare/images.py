"""The benchmark's images by name: what each instance's is called, the recipe that it stands for, and its id."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from errata_protocol.errors import SandboxUnavailable
from errata_server.sandbox.base import Backend

from ...dataset import Instance
from ...recipes import BASE_PYTHON, Recipe
from ...rules.directives import default_command
from .sources import SourceMissing

OFFICIAL = "swebench:latest"
"""Namespace and tag of the images that the benchmark publishes."""
_LOCAL = ("", "none")
"""Namespaces of images that were built on this machine, by the benchmark's own programs."""
_PLACE = re.compile(r"(.*?)(?::([\w.-]+))?", re.ASCII)


def image_name(instance: Instance, place: str = OFFICIAL) -> str:
    """Return the name of an instance's image: the one that its row names, else the benchmark's.

    Args:
        instance: The instance.
        place: ``NAMESPACE[:TAG]`` of the benchmark's names; the namespace ``none`` is that of images built locally.
    """
    if instance.image:
        return instance.image if re.search(r"[:@][^/]*$", instance.image) else f"{instance.image}:latest"
    found = _PLACE.fullmatch(place)
    namespace, tag = (found[1], found[2]) if found else (place, None)
    name = f"sweb.eval.x86_64.{instance.instance_id.lower()}"
    if namespace not in _LOCAL:
        name = f"{namespace}/{name}".replace("__", "_1776_")
    return f"{name}:{tag or 'latest'}"


def image_recipes(instances: Iterable[Instance], place: str | None) -> dict[str, dict[str, Any]]:
    """Return the recipes, as JSON objects by instance id, that build instances on their images.

    Args:
        instances: The instances.
        place: ``NAMESPACE[:TAG]`` of the benchmark's images, see `image_name`; None gives no recipes.
    """
    if place is None:
        return {}
    return {
        instance.instance_id: {
            "instance_id": instance.instance_id,
            "source": {"kind": "image", "name": image_name(instance, place)},
            "python": BASE_PYTHON,
            "test_command": default_command(instance),
        }
        for instance in instances
    }


async def base_id(backend: Backend, name: str = "default") -> str:
    """Return the id of a base tree or image."""
    sandbox = await backend.open(base=name)
    try:
        return (await sandbox.snapshot()).ref.id
    finally:
        await sandbox.destroy()


async def image_id(backend: Backend, recipe: Recipe) -> str:
    """Return the id of the image that a recipe names.

    Raises:
        SourceMissing: The engine does not have the image, or the broker does not allow it.
        SandboxUnavailable: The backend has no images, or cannot start.
    """
    name = recipe.source.name
    info = await backend.start()
    if info.name != "docker":
        raise SandboxUnavailable(
            f"{recipe.instance_id} is built on the image {name}, and the sandbox backend {info.name} has no images: "
            f"set ERRATA_SANDBOX=docker; or `errata image export {name} -o FILE.tar`, and name that file in a recipe "
            "with a source of kind tree"
        )
    try:
        return await base_id(backend, name)
    except SandboxUnavailable as error:
        raise SourceMissing(f"{recipe.instance_id}: {error.message}") from error


def inputs(recipe: Recipe) -> str:
    """Return the option of ``errata swe`` that gives a recipe."""
    return "--images" if recipe.source.kind == "image" else "--recipes FILE"
