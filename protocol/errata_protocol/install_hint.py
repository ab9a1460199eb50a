"""Makes the ``pip install`` command for an extra, from where its distribution was installed: index, checkout, file or
repository."""

from __future__ import annotations

import json
import shlex
from urllib.parse import unquote, urlsplit

DISTRIBUTION = "openenv-errata"


def install_hint(extra: str, direct_url: str | None, distribution: str = DISTRIBUTION) -> str:
    """Return the ``pip install`` command that adds an extra.

    Args:
        extra: Name of the extra, e.g. ``parquet``.
        direct_url: Text of the distribution's ``direct_url.json`` (PEP 610), as
            ``importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")`` returns it; None if it was
            installed from an index.
        distribution: Name of the distribution that has the extra.
    """
    wanted = f"{distribution}[{extra}]"
    try:
        origin = json.loads(direct_url) if direct_url else {}
    except ValueError:
        origin = {}
    url = origin.get("url") if isinstance(origin, dict) else None
    if not isinstance(url, str):
        return f"pip install {shlex.quote(wanted)}"
    if isinstance(origin.get("dir_info"), dict) and url.startswith("file:"):
        option = "-e " if origin["dir_info"].get("editable") else ""
        return f"pip install {option}{shlex.quote(f'{unquote(urlsplit(url).path)}[{extra}]')}"
    vcs = origin.get("vcs_info")
    if isinstance(vcs, dict):
        url = f"{vcs.get('vcs', 'git')}+{url}@{vcs.get('commit_id', 'HEAD')}"
        if isinstance(folder := origin.get("subdirectory"), str):
            url += f"#subdirectory={folder}"
    return f"pip install {shlex.quote(f'{wanted} @ {url}')}"
