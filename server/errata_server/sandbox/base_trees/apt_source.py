"""Reads where this host gets its Debian packages (suite, mirror, keyring) from apt's own configuration.

So a base tree is built from a mirror and through a proxy that this host can reach. Both formats of apt's source files
are read: one-line (``sources.list``) and deb822 (``*.sources``).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

DEFAULT_SUITE = "bookworm"
DEFAULT_MIRRORS = {"debian": "http://deb.debian.org/debian", "ubuntu": "http://archive.ubuntu.com/ubuntu"}
_SCRIPTS = Path("/usr/share/debootstrap/scripts")


@dataclass(frozen=True, slots=True)
class AptSource:
    """A package archive from which a base tree can be built.

    Args:
        suite: Codename of a release, e.g. ``bookworm``.
        mirror: URI of the archive.
        components: Components that have the packages of the recipe.
        keyring: Keyring that verifies the archive; None for debootstrap's default for the suite.
    """

    suite: str
    mirror: str
    components: tuple[str, ...] = ("main",)
    keyring: Path | None = None


@dataclass(frozen=True, slots=True)
class _Entry:
    """One ``deb`` line or stanza of apt's source files."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    signed_by: str


def choose_source(*, suite: str | None = None, mirror: str | None = None, etc: Path = Path("/etc")) -> AptSource:
    """Return the archive to build from: the caller's choice, else the one of this host's apt, else Debian 12's.

    Args:
        suite: Release codename; default: the host's own release where that is Debian or Ubuntu.
        mirror: Archive URI; default: the host's own for that suite, else the distribution's main archive.
        etc: The host's ``/etc``.
    """
    release = _os_release(etc / "os-release")
    host_is_known = release.get("ID") in DEFAULT_MIRRORS
    suite = suite or (release.get("VERSION_CODENAME") if host_is_known else None) or DEFAULT_SUITE
    is_ubuntu = _family(suite, release) == "ubuntu"
    components = ("main", "universe") if is_ubuntu else ("main",)
    keyring = None
    if mirror is None:
        for entry in _entries(etc / "apt"):
            uri = _resolve(entry.uris[0])
            if suite in entry.suites and "main" in entry.components and uri is not None:
                mirror = uri
                signed_by = Path(entry.signed_by)
                # gpgv reads binary keyrings only; for a key inside the .sources file debootstrap's default is used
                keyring = signed_by if signed_by.suffix == ".gpg" and signed_by.is_file() else None
                break
        else:
            mirror = DEFAULT_MIRRORS["ubuntu" if is_ubuntu else "debian"]
    return AptSource(suite, mirror.rstrip("/"), components, keyring)


def proxy_environment() -> dict[str, str]:
    """Return environment variables for downloads through a proxy: this process's own, else from apt's configuration."""
    names = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    proxies = {name: os.environ[name] for name in names if os.environ.get(name)}
    for scheme in ("http", "https"):
        if f"{scheme}_proxy" in proxies or f"{scheme.upper()}_PROXY" in proxies:
            continue
        value = _apt_config(f"Acquire::{scheme}::Proxy")
        if value and value != "DIRECT":
            proxies[f"{scheme}_proxy"] = value
    if "HTTP_PROXY" in proxies:  # wget reads the lower-case name only
        proxies.setdefault("http_proxy", proxies["HTTP_PROXY"])
    return proxies


def _apt_config(key: str) -> str:
    """Return the value of a key of apt's configuration; "" if it is not set or there is no apt."""
    try:
        shell = subprocess.run(
            ["apt-config", "shell", "VALUE", key], capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""  # no apt on this host: nothing is configured
    words = shlex.split(shell.stdout)
    return words[0].partition("=")[2] if words else ""


def _os_release(path: Path) -> dict[str, str]:
    """Return the fields of an os-release file; none if it cannot be read."""
    fields: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return fields
    for line in lines:
        name, equals, value = line.partition("=")
        if equals and not name.startswith("#"):
            fields[name.strip()] = "".join(shlex.split(value))
    return fields


def _family(suite: str, release: dict[str, str]) -> str:
    """Return ``debian`` or ``ubuntu`` for a suite."""
    if suite == release.get("VERSION_CODENAME") and release.get("ID") in DEFAULT_MIRRORS:
        return release["ID"]
    # debootstrap has one script for all Ubuntu releases, named after the first it applied to
    return "ubuntu" if (_SCRIPTS / suite).resolve().name == "gutsy" else "debian"


def _entries(apt: Path) -> Iterator[_Entry]:
    """Yield the entries of ``sources.list``, then of the files in ``sources.list.d``. Unreadable files are skipped."""
    parts = apt / "sources.list.d"
    for path in [apt / "sources.list", *sorted(parts.glob("*.list")), *sorted(parts.glob("*.sources"))]:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        yield from _deb822(text) if path.suffix == ".sources" else _one_line(text)


def _one_line(text: str) -> Iterator[_Entry]:
    """Yield the ``deb`` entries of a file in one-line format; malformed lines are skipped."""
    for raw in text.splitlines():
        line = raw.partition("#")[0].strip()
        kind, _, rest = line.partition(" ")
        if kind != "deb":
            continue
        options = ""
        rest = rest.strip()
        if rest.startswith("["):
            options, _, rest = rest[1:].partition("]")
        fields = rest.split()
        if len(fields) < 3:
            continue
        signed_by = next((o.partition("=")[2] for o in options.split() if o.lower().startswith("signed-by=")), "")
        yield _Entry((fields[0],), (fields[1],), tuple(fields[2:]), signed_by)


def _deb822(text: str) -> Iterator[_Entry]:
    """Yield the enabled ``deb`` entries of a file in deb822 format."""
    for stanza in _stanzas(text.splitlines()):
        enabled = stanza.get("enabled", "yes").lower() not in {"no", "false", "0", "off", "without", "disable"}
        fields = {name: tuple(stanza.get(name, "").split()) for name in ("types", "uris", "suites", "components")}
        if enabled and "deb" in fields["types"] and fields["uris"] and fields["suites"]:
            signed_by = stanza.get("signed-by", "").strip()
            yield _Entry(fields["uris"], fields["suites"], fields["components"], signed_by)


def _stanzas(lines: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yield the fields of each stanza by lower-case name; continuation lines are joined by newlines."""
    stanza: dict[str, str] = {}
    name = ""
    for line in [*lines, ""]:
        if line.startswith("#"):
            continue
        if not line.strip():
            if stanza:
                yield stanza
            stanza, name = {}, ""
        elif line[0] in " \t":
            if name:
                stanza[name] += "\n" + line.strip()
        else:
            name, _, value = line.partition(":")
            name = name.strip().lower()
            stanza[name] = value.strip()


def _resolve(uri: str) -> str | None:
    """Return a URI for wget, or None: for ``mirror+file:``, as in cloud images, the first mirror of the list."""
    if uri.startswith("mirror+file:"):
        path = Path("/" + uri.removeprefix("mirror+file:").lstrip("/"))
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        uri = next((line.split()[0] for line in lines if line.strip() and not line.startswith("#")), "")
    return uri if uri.startswith(("http://", "https://", "file:")) else None
