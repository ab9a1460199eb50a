"""Draws the packages and the direction of their imports: ``python scripts/rooms_picture.py [--check]``.

The layers of the server come from the import-linter contract in pyproject.toml, so the picture cannot differ from what
``make check`` enforces. Writes docs/rooms.svg; ``--check`` compares it instead.
"""

from __future__ import annotations

import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "rooms.svg"

CHARTERS = {
    "cli": "the errata command",
    "serve": "one process under uvicorn",
    "probe": "finds the recovery class",
    "targets": "names to applications",
    "app": "create_app, adoption, several environments",
    "doors": "HTTP, /ws, MCP and the multiplexed socket",
    "simulation": "fakes of the seams, virtual time",
    "sessions": "open, step, hibernate, restore, close",
    "episodes": "state(t), forks, exports, deletion",
    "environments": "one hosted instance",
    "runtime": "one data directory",
    "workers": "processes for work of others' sizes",
    "concurrency": "threads, deadlines, the fair lock",
    "journal": "durable rows and payloads",
    "sandbox": "where commands run",
}
"""What stands in a box of the server. Modules that are no package (log, settings, clock, ids) are left out."""

WIDTH, SERVER_X, SERVER_W, ROW, GAP = 960, 250, 460, 34, 8


def layers() -> list[list[str]]:
    """Return the server's layers, from the top, as its contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(c["layers"] for c in contracts if c["name"] == "Inside the server imports run down")
    rows = [[name.strip() for name in layer.split("|")] for layer in found]
    return [kept for row in rows if (kept := [name for name in row if name in CHARTERS])]


def box(x: float, y: float, width: float, height: float, name: str, text: str, kind: str) -> str:
    """Return a box with a name in bold and what it is for."""
    lines = [
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>',
        f'<text x="{x + 9:g}" y="{y + 15:g}" class="name">{escape(name)}</text>',
        f'<text x="{x + 9:g}" y="{y + 28:g}" class="what">{escape(text)}</text>',
    ]
    return "\n".join(lines)


def arrow(x1: float, y1: float, x2: float, y2: float) -> str:
    """Return an arrow from the package that imports to the one that is imported."""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="arrow" marker-end="url(#head)"/>'


def picture() -> str:
    """Return the drawing as SVG."""
    parts, y = [], 44.0
    for names in layers():
        width = (SERVER_W - 20 - GAP * (len(names) - 1)) / len(names)
        for column, name in enumerate(names):
            parts.append(box(SERVER_X + 10 + column * (width + GAP), y, width, ROW, name, CHARTERS[name], "package"))
        y += ROW + GAP
    bottom = y + 4
    floor = bottom + 22 + ROW + 22
    side = 216
    outer = [
        f'<rect x="{SERVER_X}" y="14" width="{SERVER_W}" height="{bottom - 14:g}" rx="6" class="house"/>',
        f'<text x="{SERVER_X + 10}" y="33" class="name">errata_server: imports run down</text>',
        box(14, 14, side, ROW, "errata_trainer", "losses, hints, teachers; recipes/trl", "house"),
        box(14, 110, side, ROW, "errata_client", "clients of OpenEnv, one shared socket", "house"),
        box(48, 300, side - 34, ROW, "errata_conformance", "imports nothing of ours", "house"),
        box(48, 348, side - 34, ROW, "errata_sandboxd", "broker; imports nothing of ours", "house"),
        box(730, 14, side, ROW, "errata_redteam", "attempts on both environments", "house"),
        box(730, 62, side, ROW, "terminal_env/server", "tasks, verifiers", "house"),
        box(730, 104, side, ROW, "swe_bench_lite_env/server", "preparation, grading", "house"),
        box(730, 170, side, ROW, "errata_environment", "kit: sandboxed base, tools, grading", "house"),
        box(730, 236, side, ROW, "terminal_env, swe_bench_lite_env", "models, clients: what is published", "house"),
        box(SERVER_X, bottom + 22, SERVER_W, ROW, "errata_os", "threads, open files, files of others", "house"),
        box(14, floor, WIDTH - 28, ROW, "errata_protocol", "pure values: errors, markers, payloads, mux", "house"),
    ]
    arrows = [
        arrow(122, 48, 122, 106),
        arrow(30, 144, 30, floor - 4),
        arrow(480, bottom, 480, bottom + 18),
        arrow(480, floor - 22, 480, floor - 4),
        arrow(726, 31, 714, 31),
        arrow(726, 79, 714, 79),
        arrow(726, 121, 714, 121),
        arrow(838, 48, 838, 58),
        arrow(838, 138, 838, 166),
        arrow(726, 187, 714, 187),
        arrow(838, 204, 838, 232),
        arrow(838, 270, 838, floor - 4),
    ]
    height = floor + ROW + 14
    style = (
        "text{font-family:Helvetica,Arial,sans-serif;fill:#1b1f24}.name{font-size:12px;font-weight:600}"
        ".what{font-size:11px;fill:#57606a}.house{fill:#f6f8fa;stroke:#8c959f}.package{fill:#fff;stroke:#afb8c1}"
        ".arrow{stroke:#57606a;stroke-width:1.5}"
    )
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#57606a"/></marker>'
    )
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
    title = "<title>Packages of Errata and the direction of their imports</title>"
    ground = f'<rect width="{WIDTH}" height="{height:g}" fill="#fff"/>'
    return "\n".join(
        [svg, title, f"<style>{style}</style><defs>{head}</defs>", ground, *outer, *parts, *arrows, "</svg>\n"]
    )


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        raise SystemExit(__doc__)
    drawn = picture()
    if not sys.argv[1:]:
        PICTURE.write_text(drawn)
    elif not PICTURE.exists() or PICTURE.read_text() != drawn:
        print("docs/rooms.svg differs from the contract in pyproject.toml: run python scripts/rooms_picture.py")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
