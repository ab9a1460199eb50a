"""``errata init NAME --sandboxed``: writes a new environment into a folder."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import entry_points
from pathlib import Path

from .dockerfile import TEMPLATES, ImageText, dockerfile, filled

SUFFIX = ".template"
"""Ending of templates whose name has another ending in the new folder."""


def main(arguments: Sequence[str] = ()) -> int:
    """Run ``errata init`` and return its exit status: 0, or 2 where nothing was written."""
    parser = argparse.ArgumentParser(
        prog="errata init",
        description="Write a new environment: an installable package with one task, a Dockerfile and its own tests.",
    )
    parser.add_argument(
        "name", help="name of the environment, its package and its folder: lower-case letters, digits and _"
    )
    parser.add_argument("--sandboxed", action="store_true", help="agents run commands in sandboxes")
    parser.add_argument(
        "--output-dir", type=Path, default=Path(), metavar="DIR", help="directory in which the folder is made"
    )
    options = parser.parse_args(list(arguments))
    folder = options.output_dir / options.name
    refusal = _refusal(options.name, folder)
    if not options.sandboxed:
        refusal = "say --sandboxed; openenv init writes an environment without sandboxes, and Errata serves that too"
    if refusal:
        print(f"errata init: {refusal}", file=sys.stderr)
        return 2
    write(options.name, folder)
    print(f"{folder} has the environment {options.name}. Next:")
    print(f"  cd {folder} && pip install -e .")
    print(f"  errata environments && pytest && errata serve {options.name}")
    return 0


def _refusal(name: str, folder: Path) -> str:
    """Return why no environment of that name can be written; empty if it can be."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        return f"{name!r} cannot be the name of a package: use lower-case letters, digits and _, a letter first"
    if folder.exists():
        return f"{folder} exists: choose another name, or another --output-dir"
    if name in sys.stdlib_module_names or importlib.util.find_spec(name) is not None:
        return f"a package {name} is installed already: choose another name"
    if entry_points(group="errata.environments", name=name):
        return f"an environment {name} is installed already: choose another name"
    return ""


def write(name: str, folder: Path) -> None:
    """Write an environment.

    Args:
        name: Name of the environment and of its package.
        folder: The folder to make.
    """
    stem = name.removesuffix("_env") or name
    values = {
        "NAME": name,
        "DISTRIBUTION": name.replace("_", "-"),
        "CLASS": "".join(word.capitalize() for word in stem.split("_")),
    }
    for template, place in _files(name):
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(filled(template.read_text("utf-8"), values), "utf-8")
    (folder / name / "server" / "Dockerfile").write_text(dockerfile(_image(name)), "utf-8")


def _files(name: str) -> Iterator[tuple[Path, Path]]:
    """Yield each template, and its place in the new folder."""
    for template in sorted(TEMPLATES.rglob("*")):
        parts = template.relative_to(TEMPLATES).parts
        if template.is_file() and parts != ("Dockerfile",):
            place = Path(name, *parts[1:]) if parts[0] == "package" else Path(*parts)
            yield template, place.with_name(place.name.removesuffix(SUFFIX))


def _image(name: str) -> ImageText:
    return ImageText(
        about=(f"{name} as an image. The context is the folder with pyproject.toml; from there:",),
        wheel="python -m pip wheel --no-deps -w dist CHECKOUT_OF_ERRATA",
        file=f"{name}/server/Dockerfile",
        context=".",
        tag=f"errata-{name.replace('_', '-')}",
        install='"$ERRATA" /opt/context',
        name=name,
    )
