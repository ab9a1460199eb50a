"""``errata image``: add images to the engine. It is for operators: the broker has no such request, so no server can.

A sandbox is made from an image whose name the broker allows (``errata/*`` by default). ``build`` builds the
``environment/Dockerfile`` of a task directory, or a directory with a Dockerfile, and gives the image such a name;
``pull`` fetches an image and names it; ``import`` makes an image of a directory, such as a base tree; ``export`` writes
an image's root file system as an archive, for ``errata base import`` and recipes of SWE-bench; ``list`` shows the
images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .names import Reference
from .schema import Image, Refused

PREFIX = "errata/base"
"""Repository of images for base trees: the image of base NAME is ``errata/base:NAME``."""
PULL_S = 3600.0
"""Deadline of each request to the engine."""


class ImageError(Exception):
    """A command failed; the message says what to do."""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        The exit status: 0, or 1 if it failed. Wrong options exit with status 2.
    """
    parser = _parser()
    options = parser.parse_args(list(argv))
    try:
        from docker import errors

        from .engine_client import EngineClient
    except ImportError as error:
        print(f"errata image: {error}: install Errata with its extra `docker` (docs/sandboxd.md)", file=sys.stderr)
        return 1
    try:
        api = EngineClient(base_url=options.engine, timeout=PULL_S, version="auto")
        done = options.run(api, options)
    except ImageError as error:
        print(f"errata image: {error}", file=sys.stderr)
        return 1
    except (errors.DockerException, OSError, ValueError) as error:  # ValueError: an address that is none
        print(f"errata image: engine {options.engine}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(done, indent=1) if options.json else options.text(done))
    return 0


def build(api: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Build the image of a task directory from its ``environment/Dockerfile``, else from its own ``Dockerfile``.

    Args:
        api: The engine (`docker.APIClient`).
        options: The command's options.

    Returns:
        ``image``, the image's name: ``--name`` or the task's base, below ``errata/base:`` unless it has a slash;
        ``id``, the image's id; ``base``, that name as given; ``context``, the directory that was built.

    Raises:
        ImageError: There is no Dockerfile, the name is not a valid tag, a ``--build-arg`` is not NAME=VALUE,
            ``task.toml`` cannot be parsed, or the build failed.
    """
    root = Path(options.directory)
    context = root / "environment" if (root / "environment").is_dir() else root
    if not (context / "Dockerfile").is_file():
        raise ImageError(f"{context / 'Dockerfile'} is not there: name a task directory, or one with a Dockerfile")
    name = options.name or base_of(root)
    tag, _, _ = _named(name)
    arguments = dict(_pair(one) for one in options.build_arg)
    stream = api.build(
        path=str(context),
        tag=tag,
        rm=True,
        forcerm=True,
        pull=False,
        nocache=options.no_cache,
        buildargs=arguments,
        network_mode=options.network,
        decode=True,
    )
    image = _followed(stream, options.quiet)
    if image is None:
        image = str(api.inspect_image(tag)["Id"])
    return {"image": tag, "id": image, "base": name, "context": str(context)}


def pull(api: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Fetch an image and, if a name is given, tag it.

    Raises:
        ImageError: It cannot be fetched, or the name is not a valid tag.
    """
    tag = _checked(options.image)
    named = _named(options.name) if options.name else None
    _followed(api.pull(options.image, stream=True, decode=True), options.quiet)
    found = api.inspect_image(options.image)
    if named is not None:
        tag, repository, version = named
        api.tag(found["Id"], repository, version)
    return {"image": tag, "id": found["Id"], "base": options.name or options.image}


def imported(api: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Make an image from a directory with a root file system, such as a base tree.

    Raises:
        ImageError: It has neither bin nor usr, it cannot be read, or the name is not a valid tag.
    """
    root = Path(options.directory).resolve()
    if not (root / "bin").exists() and not (root / "usr").exists():
        raise ImageError(f"{root} is not a root file system: it has neither bin nor usr")
    name = options.name or root.name
    tag, repository, version = _named(name)
    if not options.quiet:
        print(f"importing {root}", file=sys.stderr)
    # Without what only gradings see of a base tree: they copy it into the container.
    without = "--exclude=./usr/lib/errata-verifier"
    with subprocess.Popen(
        ["tar", "-C", str(root), "--numeric-owner", without, "-c", "."], stdout=subprocess.PIPE
    ) as tar:
        assert tar.stdout is not None
        api.import_image_from_stream(tar.stdout, repository=repository, tag=version)
    if tar.returncode > 1:  # 1: a file changed meanwhile, such as the link count of a file that base trees share
        raise ImageError(f"tar of {root} ended with {tar.returncode}: run this as a user who may read all of it")
    return {"image": tag, "id": api.inspect_image(tag)["Id"], "base": name}


def exported(api: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Write an image's root file system as a tar archive, from a container that is never started.

    Raises:
        ImageError: The output file exists, or the image's name is not one.
    """
    to = Path(options.output)
    if to.exists():
        raise ImageError(f"{to} exists already: name another file with -o")
    container = api.create_container(_checked(options.image), command=["true"])["Id"]
    part = to.with_name(to.name + ".part")
    try:
        size = shown = 0
        with part.open("wb") as file:
            for chunk in api.export(container):
                size += file.write(chunk)
                if not options.quiet and size - shown >= 256 << 20:
                    shown = size
                    print(f"{size >> 20} MiB", file=sys.stderr)
        part.rename(to)
    finally:
        part.unlink(missing_ok=True)
        api.remove_container(container, force=True)
    return {"image": options.image, "file": str(to), "bytes": size}


def listed(api: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Return the images named ``errata/...``, or all with ``--all``."""
    rows = [
        {"image": tag, "id": one["Id"], "bytes": one["Size"]}
        for one in api.images()
        for tag in one.get("RepoTags") or ()
        if options.all or tag.startswith("errata/")
    ]
    return {"images": sorted(rows, key=lambda row: str(row["image"]))}


def base_of(root: Path) -> str:
    """Return the base that a task directory names in ``task.toml``, else the directory's name.

    Raises:
        ImageError: ``task.toml`` cannot be parsed.
    """
    path = root / "task.toml"
    if path.is_file():
        try:
            named = tomllib.loads(path.read_text("utf-8")).get("errata", {}).get("base")
        except (tomllib.TOMLDecodeError, AttributeError) as error:
            raise ImageError(f"{path}: {error}") from None
        if isinstance(named, str) and named:
            return named
    return root.resolve().name


def _table(done: dict[str, Any]) -> str:
    return "\n".join(f"{row['image']:40} {row['bytes'] >> 20:6} MiB" for row in done["images"])


def _followed(stream: Iterable[dict[str, Any]], quiet: bool) -> str | None:
    """Print the progress of a build or pull; return the image's id if an event has it.

    Raises:
        ImageError: An event reports an error.
    """
    image, shown = None, set()
    for event in stream:
        if "error" in event:
            raise ImageError(str(event["error"]).strip())
        if isinstance(event.get("aux"), dict) and "ID" in event["aux"]:
            image = str(event["aux"]["ID"])
        text = str(event.get("stream") or "").strip()
        if not text and "status" in event:
            text = f"{event['status']} {event.get('id', '')}".strip()
            if text in shown or "progress" in event:
                continue
            shown.add(text)
        if text and not quiet:
            print(text, file=sys.stderr)
    return image


def _named(name: str) -> tuple[str, str, str]:
    """Return an image's name, and its repository and tag: below ``errata/base:`` unless the name has a slash.

    Raises:
        ImageError: It is not a name by the engine's grammar, or has a digest.
    """
    text = name if "/" in name else f"{PREFIX}:{name}"
    try:
        found = Reference.parse(text)
    except ValueError as error:
        raise ImageError(f"{error}: give another with --name") from None
    if found.tag is None or found.digest is not None:
        raise ImageError(f"{name!r} has a digest, which only the engine gives: give another with --name")
    return text, text.removesuffix(f":{found.tag}"), found.tag


def _checked(image: str) -> str:
    """Return a text if it is an image's id or reference.

    Raises:
        ImageError: It is neither.
    """
    try:
        Image().check("IMAGE", image)
    except Refused as error:
        raise ImageError(error.message) from None
    return image


def _pair(text: str) -> tuple[str, str]:
    """Parse NAME=VALUE."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ImageError(f"--build-arg {text}: give NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="errata image",
        description="Builds and fetches the images that container sandboxes are made of (docs/sandboxd.md). "
        "An operator's command: it needs the engine's socket.",
    )
    common = argparse.ArgumentParser(add_help=False)
    engine = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    common.add_argument("--engine", default=engine, help="the engine (default DOCKER_HOST, else /var/run/docker.sock)")
    common.add_argument("--json", action="store_true", help="print the result as JSON")
    common.add_argument("-q", "--quiet", action="store_true", help="no progress")
    verbs = parser.add_subparsers(required=True, metavar="build|pull|import|export|list")
    add = verbs.add_parser("build", parents=[common], help="build environment/Dockerfile of a task directory")
    add.add_argument("directory", help="a task directory, or one with a Dockerfile")
    add.add_argument("--name", help="base NAME, or a whole image name (default: base of task.toml)")
    add.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="again for more")
    add.add_argument(
        "--network", default="none", help="of RUN lines: none (default), default, or a network of the engine"
    )
    add.add_argument("--no-cache", action="store_true", help="run every line again")
    add.set_defaults(run=build, text=lambda done: f'{done["image"]} {done["id"]}: [errata] base = "{done["base"]}"')
    add = verbs.add_parser("pull", parents=[common], help="fetch an image")
    add.add_argument("image", help="as sweb.eval.x86_64.NAME:latest")
    add.add_argument("--name", help="also give it this base's name, or this whole image name")
    add.set_defaults(run=pull, text=lambda done: f"{done['image']} {done['id']}")
    add = verbs.add_parser("import", parents=[common], help="make an image of a directory, such as a base tree")
    add.add_argument("directory", help="a root file system")
    add.add_argument("--name", help="base NAME, or a whole image name (default: the directory's)")
    add.set_defaults(run=imported, text=lambda done: f"{done['image']} {done['id']}")
    add = verbs.add_parser("export", parents=[common], help="write an image's root file system as a tar archive")
    add.add_argument("image", help="as sweb.eval.x86_64.NAME:latest")
    add.add_argument("-o", "--output", required=True, metavar="FILE", help="the archive")
    add.set_defaults(run=exported, text=lambda done: f"{done['file']} {done['bytes'] >> 20} MiB")
    add = verbs.add_parser("list", parents=[common], help="list the images of bases")
    add.add_argument("--all", action="store_true", help="all images of the engine")
    add.set_defaults(run=listed, text=_table)
    return parser
