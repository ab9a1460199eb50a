"""Names that a request may have: ids of containers and layers, owners, and references of images.

Each is checked by its whole grammar before it becomes a part of an address, so that none of them is a path. The broker
imports nothing of Errata; `errata_protocol.names` has the names of the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

CONTAINER = r"[0-9a-f]{64}"
LAYER = r"sha256:[0-9a-f]{64}"
OWNER = r"[a-z0-9][a-z0-9_.-]{0,62}"
LONGEST_REFERENCE = 512
"""Most characters of a reference; 255 of its name, 128 of its tag, 71 of a digest."""

# The grammar of github.com/distribution/reference, which engines use.
_DOMAIN_PART = r"(?:[a-zA-Z0-9]|[a-zA-Z0-9][a-zA-Z0-9-]*[a-zA-Z0-9])"
_DOMAIN = rf"{_DOMAIN_PART}(?:\.{_DOMAIN_PART})*(?::[0-9]{{1,5}})?"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_REFERENCE = re.compile(
    rf"(?P<name>(?:{_DOMAIN}/)?{_PART}(?:/{_PART})*)(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{LAYER}))?", re.ASCII
)
_LONGEST_NAME = 255
_DEFAULT_DOMAINS = ("docker.io", "index.docker.io")


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference of an image.

    Args:
        name: Name of the image as engines list it: without the default registry, and without ``library/`` there.
        tag: Tag of the image; ``latest`` if it has neither a tag nor a digest.
        digest: Digest of the image, ``sha256:...``; None if it has none.
    """

    name: str
    tag: str | None
    digest: str | None

    @classmethod
    def parse(cls, text: str) -> Reference:
        """Return the reference that a text is.

        Raises:
            ValueError: It is none, or could be the id of an image.
        """
        found = _REFERENCE.fullmatch(text) if len(text) <= LONGEST_REFERENCE else None
        is_id = found is not None and (found["name"] == "sha256" or re.fullmatch(CONTAINER, found["name"]))
        if found is None or is_id or len(found["name"]) > _LONGEST_NAME:
            raise ValueError(f"{text[:80]!r} is not a reference of an image: NAME, NAME:TAG or NAME@sha256:DIGEST")
        name = found["name"]
        domain, slash, rest = name.partition("/")
        if slash and domain in _DEFAULT_DOMAINS:
            name = rest
        if name.count("/") == 1:
            name = name.removeprefix("library/")
        tag = found["tag"] or (None if found["digest"] else "latest")
        return cls(name, tag, found["digest"])

    def is_carried_by(self, tags: Iterable[str], digests: Iterable[str]) -> bool:
        """Return whether an image has this name, among the tags and digests that the engine lists for it.

        An engine also finds images by the beginning of an id, and by names that it completes.
        """
        tagged = self.tag is None or f"{self.name}:{self.tag}" in tags
        return tagged and (self.digest is None or f"{self.name}@{self.digest}" in digests)


def segment(text: str) -> str:
    """Return a name as one segment of an address's path, encoded.

    Raises:
        ValueError: It is empty, ``.`` or ``..``, which no encoding keeps from being a path.
    """
    if text in ("", ".", ".."):
        raise ValueError(f"{text!r} cannot be a part of an address")
    return quote(text, safe="")
