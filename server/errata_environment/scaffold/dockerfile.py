"""The Dockerfile of an environment, from the one template that all of them have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True, slots=True)
class ImageText:
    """What differs between the Dockerfiles of two environments.

    Args:
        about: First lines of the comment at the top, without ``#``.
        wheel: Command that puts Errata's wheel into the context, as long as no package index has it.
        file: The Dockerfile's path in the build command.
        context: Directory of the build context in the build command.
        tag: Name of the image.
        install: Arguments of ``pip install``.
        name: Name of the environment.
    """

    about: tuple[str, ...]
    wheel: str
    file: str
    context: str
    tag: str
    install: str
    name: str


def dockerfile(image: ImageText) -> str:
    """Return the Dockerfile of an environment."""
    values = {
        "ABOUT": "\n".join(f"# {line}" for line in image.about),
        "WHEEL": image.wheel,
        "FILE": image.file,
        "CONTEXT": image.context,
        "TAG": image.tag,
        "INSTALL": image.install,
        "NAME": image.name,
    }
    return filled((TEMPLATES / "Dockerfile").read_text("utf-8"), values)


def filled(text: str, values: dict[str, str]) -> str:
    """Return a template's text with ``@WORD@`` replaced by the value of each word."""
    for word, value in values.items():
        text = text.replace(f"@{word}@", value)
    return text
