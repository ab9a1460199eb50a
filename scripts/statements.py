"""Write the kit's statements.json and schemas/ from rfcs/notes/ and rfcs/schemas/; ``--check``: are they up to date?"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KIT = ROOT / "conformance" / "errata_conformance"
STATEMENT = re.compile(r"^- \*\*(R-\d{3}-\d+)\*\* \((\w+)(?:: ([^)]*))?\) (.*?)(?=^- \*\*R-|^\s*$|^#)", re.M | re.S)

CLIENT = frozenset(
    "R-014-12 R-014-13 R-014-19 R-015-7 R-015-13 R-015-23 R-015-24 R-016-1 R-016-8 R-016-40 "  # noqa: SIM905
    "R-016-47 R-016-48 R-016-49 R-016-51".split()
)
"""The statements that bind a client alone. Where one binds both sides, the server's part is checked from outside."""


def generated() -> dict[Path, str]:
    """Return path -> content of every generated file."""
    found: list[dict[str, str]] = []
    for path in sorted((ROOT / "rfcs" / "notes").glob("*.md")):
        for name, tag, reason, text in STATEMENT.findall(path.read_text()):
            text = " ".join(text.split())
            level = "MUST" if "MUST" in text else "SHOULD"
            side = "client" if name in CLIENT else "server"
            one = {"id": name, "tag": tag, "side": side, "level": level, "reason": " ".join(reason.split())}
            found.append({**one, "text": text})
    found.sort(key=lambda one: [int(number) for number in one["id"].split("-")[1:]])
    files = {KIT / "statements.json": json.dumps(found, indent=1, ensure_ascii=False) + "\n"}
    for path in sorted((ROOT / "rfcs" / "schemas").glob("*.json")):
        files[KIT / "schemas" / path.name] = path.read_text()
    return files


def main() -> int:
    """Write, or with ``--check`` only compare."""
    wanted = generated()
    there = {
        path: path.read_text() for path in [KIT / "statements.json", *(KIT / "schemas").glob("*.json")] if path.exists()
    }
    if "--check" in sys.argv:
        stale = sorted(str(p.relative_to(ROOT)) for p in wanted.keys() | there.keys() if wanted.get(p) != there.get(p))
        print("\n".join(f"{name} is stale: run scripts/statements.py" for name in stale) or "up to date")
        return 1 if stale else 0
    for path in there.keys() - wanted.keys():
        path.unlink()
    for path, text in wanted.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    print(f"{len(wanted)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
